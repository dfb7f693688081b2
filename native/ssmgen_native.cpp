// Three functions of ssmgen in C++, each with the interface and the results of the one in Python:
//   Enqueue  ssmgen.launch.enqueue.enqueuing     one launch, as ctypes makes it
//   Plan     ssmgen.launch.runtime.plan_of       launches in a row on the current stream
//   Row      ssmgen.calls.fast_path._row  a call like one seen before: compared, its plan found by its pointers, launched
// It sees inside of torch's tensors, so it is of one release of torch. The GIL guards all that changes, and is let go of in a launch alone.
#include <Python.h>
#include <structmember.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// A reference that is counted.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : at_(owned) {}
  static Ref to(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
  Ref(Ref&& other) noexcept : at_(std::exchange(other.at_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(at_, other.at_);
    return *this;
  }
  ~Ref() { Py_XDECREF(at_); }
  PyObject* get() const { return at_; }
  PyObject* give() { return std::exchange(at_, nullptr); }
  explicit operator bool() const { return at_ != nullptr; }

 private:
  PyObject* at_ = nullptr;
};

struct Raised {};  // a Python exception is set, or the arguments of a type are none of its

void need(bool done) {
  if (!done) throw Raised();
}

// A Python type whose objects are called. T makes itself of arguments, answers calls, and says what it holds; that is never taken from it
// while it lives, so collecting circles is left to the other objects in them.
template <class T>
struct Callable {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  T body;

  static PyObject* call(PyObject* self, PyObject* const* args, size_t count, PyObject* names) {
    if (names && PyTuple_GET_SIZE(names)) return PyErr_Format(PyExc_TypeError, "%s takes no names", Py_TYPE(self)->tp_name);
    return guarded([&] { return reinterpret_cast<Callable*>(self)->body.call(args, PyVectorcall_NARGS(count)); });
  }

  template <class F>
  static PyObject* guarded(F f) {
    try {
      return f();
    } catch (const Raised&) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "arguments of other types");
    } catch (const std::exception& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
  }

  static PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    auto* self = reinterpret_cast<Callable*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->vectorcall = call;
    new (&self->body) T();
    Ref made(reinterpret_cast<PyObject*>(self));
    return guarded([&] { return self->body.make(args), made.give(); });
  }

  static void free(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    reinterpret_cast<Callable*>(self)->body.~T();
    type->tp_free(self);
    Py_DECREF(type);
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    int found = 0;
    reinterpret_cast<Callable*>(self)->body.each([&](const Ref& held) {
      if (!found && held) found = visit(held.get(), arg);
    });
    return found;
  }

  static bool add(PyObject* module, const char* name) {
    PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, nullptr}, {}};
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(make)},
        {Py_tp_dealloc, reinterpret_cast<void*>(free)},
        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
        {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
        {Py_tp_members, members},
        {0, nullptr},
    };
    PyType_Spec spec = {name, sizeof(Callable), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC, slots};
    Ref type(PyType_FromSpec(&spec));
    return type && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type.get())) == 0;
  }
};

// cuLaunchKernelEx(config, kernel, arguments), of addresses; `kept` lives as long. Returns the driver's error.
struct Enqueue {
  using Launch = int (*)(const void* config, void* kernel, void** arguments, void** extra);
  Launch launch;
  void *config, *kernel, **arguments;
  Ref kept;

  void make(PyObject* args) {
    unsigned long long at[4];
    PyObject* keep;
    need(PyArg_ParseTuple(args, "KKKKO", &at[0], &at[1], &at[2], &at[3], &keep));
    launch = reinterpret_cast<Launch>(at[0]);
    config = reinterpret_cast<void*>(at[1]);
    kernel = reinterpret_cast<void*>(at[2]);
    arguments = reinterpret_cast<void**>(at[3]);
    kept = Ref::to(keep);
  }

  template <class F>
  void each(F f) const {
    f(kept);
  }

  PyObject* call(PyObject* const*, size_t) {
    int code;
    Py_BEGIN_ALLOW_THREADS;  // the queue of launches may be full, and wait for the host function of another thread
    code = launch(config, kernel, arguments, nullptr);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(code);
  }
};

// Makes the launches of the current stream, which `ready(stream)` puts into `known`: a list of (launch, enqueue) by stream.
struct Plan {
  Ref device, current_stream, known, ready;

  void make(PyObject* args) {
    PyObject *index, *stream, *by_stream, *more;
    need(PyArg_ParseTuple(args, "OOO!O", &index, &stream, &PyDict_Type, &by_stream, &more));
    device = Ref::to(index), current_stream = Ref::to(stream), known = Ref::to(by_stream), ready = Ref::to(more);
  }

  template <class F>
  void each(F f) const {
    f(device), f(current_stream), f(known), f(ready);
  }

  PyObject* call(PyObject* const*, size_t) {
    Ref stream(PyObject_CallOneArg(current_stream.get(), device.get()));
    need(bool(stream));
    Ref launches = Ref::to(PyDict_GetItemWithError(known.get(), stream.get()));
    if (!launches && !PyErr_Occurred()) launches = Ref(PyObject_CallOneArg(ready.get(), stream.get()));
    need(launches && PyList_Check(launches.get()));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(launches.get()); ++i) {
      PyObject* pair = PyList_GET_ITEM(launches.get(), i);
      PyObject *launch = PyTuple_GET_ITEM(pair, 0), *enqueue = PyTuple_GET_ITEM(pair, 1);
      Ref code(PyObject_CallNoArgs(enqueue));
      need(bool(code));
      if (PyObject_IsTrue(code.get())) need(bool(Ref(PyObject_CallMethod(launch, "failed", "OO", code.get(), enqueue))));
    }
    Py_RETURN_NONE;
  }
};

// What of a thread's state changes operators.
struct Modes {
  c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  bool grad = c10::GradMode::is_enabled();
  uint64_t keys(const at::Tensor& t) const { return ((t.key_set() | local.included_) - local.excluded_).raw_repr(); }
};

// What a tensor is, but for where it lies: what torch's guard object compares. A call where graphs are recorded is not one like this.
struct Like {
  PyTypeObject* type;
  uint64_t keys;  // of these follow its layout and kind of device, and that it is no tensor of a transform, or without memory
  at::ScalarType dtype;
  c10::DeviceIndex device;
  bool needs_grad;
  std::vector<int64_t> sizes, strides;

  bool matches(const at::Tensor& t, const Modes& modes) const {
    return modes.keys(t) == keys && t.scalar_type() == dtype && t.device().index() == device && t.requires_grad() == needs_grad &&
           !(needs_grad && modes.grad) && t.sizes() == c10::IntArrayRef(sizes) && t.strides() == c10::IntArrayRef(strides);
  }
};

using Pointers = c10::SmallVector<uint64_t, 32>;

struct Hash {
  size_t operator()(const Pointers& pointers) const {
    uint64_t hash = pointers.size();
    for (uint64_t p : pointers) hash = (hash ^ p) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    return hash;
  }
};

struct Row {
  struct Place {  // of a value: the argument, and the item of one that is a tuple or list, else -1
    Py_ssize_t argument, item;
  };
  struct Several {
    Py_ssize_t argument, length;
    PyTypeObject* type;
  };
  struct Found {
    c10::SmallVector<Ref, 32> tensors;  // held, as lists may lose them meanwhile
    Pointers pointers;
  };

  Py_ssize_t positional, limit;
  std::vector<Ref> names, kept, new_tensors, types;
  std::vector<Several> several;
  std::vector<Place> plain, at;
  std::vector<Like> like;
  std::vector<Py_ssize_t> returned;
  bool distinct = true;  // of no call like it is a tensor given twice
  Ref plan_at;
  std::unordered_map<Pointers, Ref, Hash> plans;

  template <class F>
  void each(F f) const {
    for (auto* held : {&names, &kept, &new_tensors, &types})
      for (const Ref& ref : *held) f(ref);
    for (const auto& [_, plan] : plans) f(plan);
    f(plan_at);
  }

  void make(PyObject* args);
  PyTypeObject* type_of(PyObject* value);
  bool matches(PyObject* args, PyObject* named, Found& found) const;
  Ref plan_of(const Pointers& pointers);
  PyObject* call(PyObject* const* args, size_t count);
};

std::vector<Ref> items_of(PyObject* sequence) {
  Ref fast(PySequence_Fast(sequence, "not a sequence"));
  need(bool(fast));
  std::vector<Ref> items;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.get()); ++i) items.push_back(Ref::to(PySequence_Fast_GET_ITEM(fast.get(), i)));
  return items;
}

std::vector<Py_ssize_t> numbers_of(PyObject* sequence) {
  std::vector<Py_ssize_t> numbers;
  for (auto& item : items_of(sequence)) numbers.push_back(PyLong_AsSsize_t(item.get()));
  need(!PyErr_Occurred());
  return numbers;
}

// Row(count, names, values, plain, positions, plan_at, limit, new, returned)
//   count: arguments without names; values: of the call that was seen, those with names behind the others
//   plain, positions: of what is no tensor, and of tensors, in a row of all values in which those in tuples and lists have places of their own
//   plan_at: the plan for a tuple of pointers, kept for so many; new: makes each new tensor; returned: positions of these, behind the tensors
void Row::make(PyObject* args) {
  PyObject *named, *seen, *plain_at, *tensors_at, *plan, *made, *results;
  need(PyArg_ParseTuple(args, "nOOOOOnOO", &positional, &named, &seen, &plain_at, &tensors_at, &plan, &limit, &made, &results));
  names = items_of(named), new_tensors = items_of(made), returned = numbers_of(results), plan_at = Ref::to(plan);
  std::vector<Ref> flat, values = items_of(seen);
  std::vector<Place> places;
  for (Py_ssize_t i = 0; i < Py_ssize_t(values.size()); ++i) {
    PyObject* value = values[i].get();
    if (!PyTuple_Check(value) && !PyList_Check(value)) {
      places.push_back({i, -1}), flat.push_back(std::move(values[i]));
      continue;
    }
    std::vector<Ref> items = items_of(value);
    several.push_back({i, Py_ssize_t(items.size()), type_of(value)});
    for (Py_ssize_t j = 0; j < Py_ssize_t(items.size()); ++j) places.push_back({i, j}), flat.push_back(std::move(items[j]));
  }
  for (Py_ssize_t i : numbers_of(plain_at)) plain.push_back(places.at(i)), kept.push_back(Ref::to(flat.at(i).get()));
  const Modes modes;
  const auto tensors = numbers_of(tensors_at);
  for (Py_ssize_t i : tensors) {
    PyObject* object = flat.at(i).get();
    need(THPVariable_Check(object));
    const at::Tensor& t = THPVariable_Unpack(object);
    at.push_back(places[i]);
    like.push_back({type_of(object), modes.keys(t), t.scalar_type(), t.device().index(), t.requires_grad(), t.sizes().vec(), t.strides().vec()});
    for (Py_ssize_t j : tensors) distinct = distinct && (i == j || flat.at(j).get() != object);
  }
}

PyTypeObject* Row::type_of(PyObject* value) {
  types.push_back(Ref::to(reinterpret_cast<PyObject*>(Py_TYPE(value))));
  return Py_TYPE(value);
}

// Whether a call is like the one seen; then its tensors and their pointers.
bool Row::matches(PyObject* args, PyObject* named, Found& found) const {
  if (PyTuple_GET_SIZE(args) != positional || PyDict_GET_SIZE(named) != Py_ssize_t(names.size())) return false;
  auto argument = [&](Py_ssize_t i) {  // borrowed; nullptr where there is another name
    return i < positional ? PyTuple_GET_ITEM(args, i) : PyDict_GetItemWithError(named, names[i - positional].get());
  };
  auto value = [&](Place place) {
    PyObject* given = argument(place.argument);
    if (!given || place.item < 0) return given;
    return PyTuple_Check(given) ? PyTuple_GET_ITEM(given, place.item) : PyList_GET_ITEM(given, place.item);
  };
  for (const Several& s : several) {
    PyObject* given = argument(s.argument);
    if (!given || Py_TYPE(given) != s.type || Py_SIZE(given) != s.length) return false;
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    PyObject *given = value(plain[i]), *seen = kept[i].get();
    if (given == seen) continue;
    if (!given || Py_TYPE(given) != Py_TYPE(seen)) return false;  // nothing is compared with what is of another type
    if (PyObject_RichCompareBool(given, seen, Py_EQ) != 1) return false;
  }
  const Modes modes;
  for (size_t i = 0; i < at.size(); ++i) {
    PyObject* given = value(at[i]);
    if (!given || Py_TYPE(given) != like[i].type) return false;
    const at::Tensor& t = THPVariable_Unpack(given);
    if (!like[i].matches(t, modes)) return false;
    for (size_t j = 0; distinct && j < i; ++j)
      if (found.tensors[j].get() == given) return false;
    found.tensors.push_back(Ref::to(given));
    found.pointers.push_back(reinterpret_cast<uint64_t>(t.mutable_data_ptr()));
  }
  return true;
}

Ref Row::plan_of(const Pointers& pointers) {
  if (auto known = plans.find(pointers); known != plans.end()) return Ref::to(known->second.get());
  Ref key(PyTuple_New(pointers.size()));
  need(bool(key));
  for (size_t i = 0; i < pointers.size(); ++i) {
    PyTuple_SET_ITEM(key.get(), i, PyLong_FromUnsignedLongLong(pointers[i]));
    need(PyTuple_GET_ITEM(key.get(), i));
  }
  Ref plan(PyObject_CallOneArg(plan_at.get(), key.get()));
  need(bool(plan));
  if (Py_ssize_t(plans.size()) >= limit) std::exchange(plans, {});
  plans[pointers] = Ref::to(plan.get());
  return plan;
}

PyObject* Row::call(PyObject* const* args, size_t count) {
  need(count == 2 && PyTuple_Check(args[0]) && PyDict_Check(args[1]));
  Found found;
  try {
    if (!matches(args[0], args[1], found)) {
      need(!PyErr_Occurred());
      Py_RETURN_NONE;
    }
  } catch (const std::exception&) {  // what torch refuses to say of a tensor is the checks' to say
    Py_RETURN_NONE;
  }
  for (const Ref& make : new_tensors) {
    Ref made(PyObject_CallNoArgs(make.get()));
    need(made && THPVariable_CheckExact(made.get()));
    found.pointers.push_back(reinterpret_cast<uint64_t>(THPVariable_Unpack(made.get()).mutable_data_ptr()));
    found.tensors.push_back(std::move(made));
  }
  Ref plan = plan_of(found.pointers);
  need(bool(Ref(PyObject_CallNoArgs(plan.get()))));
  if (returned.size() == 1) return found.tensors[returned[0]].give();
  Ref results(PyTuple_New(returned.size()));
  need(bool(results));
  for (size_t i = 0; i < returned.size(); ++i) PyTuple_SET_ITEM(results.get(), i, Py_NewRef(found.tensors[returned[i]].get()));
  return results.give();
}

int fill(PyObject* module) {
  const bool done = Callable<Enqueue>::add(module, "ssmgen_native.Enqueue") && Callable<Plan>::add(module, "ssmgen_native.Plan") &&
                    Callable<Row>::add(module, "ssmgen_native.Row") &&
                    PyModule_AddStringConstant(module, "torch_version", BUILT_FOR_TORCH) == 0 &&
                    PyModule_AddStringConstant(module, "ssmgen_version", BUILT_FOR_SSMGEN) == 0;
  return done ? 0 : -1;
}

}  // namespace

PyMODINIT_FUNC PyInit_ssmgen_native() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ssmgen_native", "Calls of ssmgen in C++; see README.md.", 0, nullptr};
  Ref module(PyModule_Create(&definition));
  return module && fill(module.get()) == 0 ? module.give() : nullptr;
}
