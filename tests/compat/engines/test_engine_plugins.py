"""The plugins of vLLM and SGLang: every name that an engine holds is replaced and given back; the engine serves calls that ssmgen
refuses."""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_signatures import FUNCTIONS, SIGNATURES, VERSIONS
from engine_stand_ins import all_are_asked_for as all_are_asked_for
from engine_stand_ins import answer, importable, modules_of, write
from engine_stand_ins import found as place_of

from ssmgen.compat import sglang, vllm
from ssmgen.compat.shared import replacing
from ssmgen.errors import ArgumentError, CaptureError, LaunchError, NotBuiltError, UnsupportedError

PLUGINS = {"vllm": vllm, "sglang": sglang}
OURS = {(r.module, r.name): r.form for plugin in PLUGINS.values() for r in plugin._ENGINE.replacements}


def of(package: str) -> list[tuple[str, str]]:
    return [place for place in SIGNATURES if place[0].partition(".")[0] == package]


def function_of(parameters: str):
    made: dict = {}
    exec(f"def function({parameters}): pass", made)
    return made["function"]


# The contract.


def test_all_that_is_replaced_is_recorded():
    assert set(OURS) == set(SIGNATURES)
    assert set(replacing.NAMES) == {name for _, name in FUNCTIONS}
    assert {name: plugin._ENGINE.version for name, plugin in PLUGINS.items()} == VERSIONS


@pytest.mark.parametrize("place", SIGNATURES, ids=".".join)
def test_our_parameters_are_the_published_ones(place):
    assert replacing.differences(OURS[place], function_of(SIGNATURES[place])) == []


@pytest.mark.parametrize("place", SIGNATURES, ids=".".join)
def test_the_installed_engine_has_not_drifted(place):
    module, name = place
    package = module.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = place_of(module, name)
    assert replacing.differences(function_of(SIGNATURES[place]), getattr(found, "__func__", found)) == []


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("a, b=1, *, c=None", []), ("a: int, b: float = 1, *, c=None", []), ("a, b=1, *, c=None, d=0", ["d is new"]),
        ("a, *, c=None", ["b is gone"]), ("a, b=2, *, c=None", ["b=2 was b=1"]), ("a, b=1, c=None", ["c=None was c=None"]),
        ("b=1, a=0, *, c=None", ["a=0 was a"]), ("a, b=1, *, c=None, **more", ["more is new"]),
    ],
)  # fmt: skip
def test_differences_in_words(theirs, words):
    assert replacing.differences(function_of("a, b=1, *, c=None"), function_of(theirs)) == words


def test_order_is_a_difference_too():
    assert replacing.differences(function_of("a, b"), function_of("b, a")) == ["their order is b, a"]
    assert "cannot be read" in replacing.differences(function_of("a"), 3)[0]


# Replacing and giving back.


@pytest.fixture(params=sorted(PLUGINS))
def engine(request, tmp_path, monkeypatch):
    """The name of an engine, whose stand-in can be imported, on a torch for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("SSMGEN_ENGINE_KEEP", raising=False)
    write(tmp_path, request.param)
    with importable(tmp_path, request.param):
        yield request.param
        PLUGINS[request.param].unregister()


def held(package: str) -> dict[str, object]:
    """{module.name: function} of all names in the engine's modules that one of the functions goes by."""
    names = {name for _, name in SIGNATURES} | {"causal_conv1d_fn_cuda", "fla_chunk_gated_delta_rule"}
    names |= {"causal_conv1d_update_triton", "_causal_conv1d_update_triton", "_causal_conv1d_fn_triton", "triton_chunk_kda"}
    dispatchers = ("ssu_dispatch",)
    return {
        f"{m.__name__}.{n}": f
        for m in modules_of(package)
        for n, f in vars(m).items()
        if n in names and not m.__name__.endswith(dispatchers)
    }


def ours(function) -> bool:
    return inspect.unwrap(function) is not function


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_name_is_replaced_and_given_back(engine, when):
    plugin = PLUGINS[engine]
    if when == "before":
        assert set(plugin.register().values()) == {replacing.WAITING}
        assert not any(name.startswith(f"{engine}.") for name in sys.modules), "the engine was imported"
    else:
        assert not any(map(ours, held(engine).values()))
        plugin.register()
    found = held(engine)
    functions = [name for place in of(engine) if place in FUNCTIONS and "." not in (name := place[1])]  # methods have no other names
    assert len(found) > 2 * len(functions) and all(map(ours, found.values()))
    assert plugin.register() == {f"{module}.{name}": replacing.REPLACED for module, name in of(engine)}
    assert held(engine) == found, "the second call replaced again"
    plugin.unregister()
    after = held(engine)
    assert set(after) == set(found) and not any(map(ours, after.values()))
    assert all(after[name] is inspect.unwrap(found[name]) for name in after)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_methods_are_replaced_in_their_class_and_given_back(engine, when):
    """The class's own capability is replaced with the method, and inherited again afterwards; this also holds for existing objects."""
    (place,) = [p for p in of(engine) if p[1] == "TritonGDNKernel.extend"]
    owner = place[1].partition(".")[0]
    if when == "before":
        PLUGINS[engine].register()
    kernel = place_of(place[0], owner)()
    if when == "after":
        assert not ours(type(kernel).extend) and not kernel.supports_track_state_snapshot
        PLUGINS[engine].register()
    assert ours(type(kernel).extend) and ours(kernel.extend.__func__) and kernel.supports_track_state_snapshot
    importlib.reload(sys.modules[place[0]])
    other = place_of(place[0], owner)
    assert other is not type(kernel) and ours(other.extend) and other.supports_track_state_snapshot
    PLUGINS[engine].unregister()
    for cls in (type(kernel), other):
        assert not ours(cls.extend) and "supports_track_state_snapshot" not in vars(cls) and not cls.supports_track_state_snapshot


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_a_static_method_stays_one(engine, monkeypatch):
    """Called on an object, it gets no self; and the original, of which the class held a static method, comes back as it was."""
    (place,) = [p for p in of(engine) if p[1] == "MambaMixer1._selective_scan"]
    mixer = place_of(place[0], "MambaMixer1")
    before = vars(mixer)["_selective_scan"]
    PLUGINS[engine].register()
    assert isinstance(vars(mixer)["_selective_scan"], staticmethod) and ours(mixer._selective_scan)
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        mixer()._selective_scan(1)
    PLUGINS[engine].unregister()
    assert vars(mixer)["_selective_scan"] is before and not ours(mixer._selective_scan)


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
@pytest.mark.parametrize("missing", ["TritonGDNKernel", "extend"])
def test_a_class_or_method_that_is_gone_is_said(engine, missing):
    (place,) = [p for p in of(engine) if p[1] == "TritonGDNKernel.extend"]
    module = importlib.import_module(place[0])
    delattr(*((module, missing) if missing == "TritonGDNKernel" else (module.TritonGDNKernel, missing)))
    assert "the function does not exist; ssmgen was written for" in PLUGINS[engine].register()[".".join(place)]
    assert missing == "TritonGDNKernel" or not module.TritonGDNKernel.supports_track_state_snapshot


def test_what_was_imported_between_is_given_back_too(engine):
    """A module that is imported after register() holds a replacement that register() has not put there."""
    plugin, (module, name) = PLUGINS[engine], of(engine)[0]
    plugin.register()
    late = type(sys)(f"{engine}.late")
    late.alias = getattr(importlib.import_module(module), name)
    sys.modules[late.__name__] = late
    assert ours(late.alias)
    plugin.unregister()
    assert not ours(late.alias)
    importlib.reload(sys.modules[module])
    assert not ours(getattr(sys.modules[module], name)), "the hook is still there"


def test_a_reloaded_module_is_replaced_again(engine):
    """Both replacements are taken back; the first one from the modules that had imported it."""
    plugin, (module, name) = PLUGINS[engine], [p for p in of(engine) if p in FUNCTIONS][-1]
    plugin.register()
    first = getattr(importlib.import_module(module), name)
    modules_of(engine)
    again = getattr(importlib.reload(sys.modules[module]), name)
    assert ours(again) and again is not first
    assert any(f is first for f in held(engine).values())
    plugin.unregister()
    assert not any(map(ours, held(engine).values()))


def test_modules_keep_their_loader(engine):
    PLUGINS[engine].register()
    for module in modules_of(engine):
        assert type(module.__loader__) is SourceFileLoader and module.__spec__.loader is module.__loader__
        assert inspect.getsource(module)


def test_a_function_of_the_same_name_stays(engine, monkeypatch):
    """The dispatcher has such a function; at its call it imports ours."""
    with_ours(monkeypatch, engine, lambda *args, **kwargs: (args, kwargs))
    (dispatcher,) = [m for m in modules_of(engine) if m.__name__.endswith("ssu_dispatch")]
    assert not ours(dispatcher.selective_state_update)
    assert dispatcher.selective_state_update(1, 2, out=3) == ((1, 2), {"out": 3})


def test_names_outside_the_engine_stay(engine, monkeypatch):
    module, name = of(engine)[0]
    original = getattr(importlib.import_module(module), name)
    other = type(sys)("somebody_else")
    other.function = original
    monkeypatch.setitem(sys.modules, "somebody_else", other)
    PLUGINS[engine].register()
    assert other.function is original


# Names that are left unchanged.


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_variable_keeps_single_functions(engine, when, monkeypatch):
    kept = {name for _, name in of(engine)[:2]}
    monkeypatch.setenv("SSMGEN_ENGINE_KEEP", " , ".join(kept))
    if when == "after":
        modules_of(engine)
    outcome = PLUGINS[engine].register()
    for module, name in of(engine):
        assert ("SSMGEN_ENGINE_KEEP" in outcome[f"{module}.{name}"]) == (name in kept)
        assert ours(place_of(module, name)) == (name not in kept)


def test_the_variable_keeps_all(engine, monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_KEEP", "all")
    PLUGINS[engine].register()
    assert not any(map(ours, held(engine).values()))


def test_the_variable_misspelt(engine, monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_KEEP", "selective_state_update,conv")
    with pytest.raises(ArgumentError, match="SSMGEN_ENGINE_KEEP names conv; expected all,"):
        PLUGINS[engine].register()
    assert not any(map(ours, held(engine).values()))


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_nothing_happens_without_the_engine_or_without_cuda(plugin, tmp_path, monkeypatch):
    package, path = plugin._ENGINE.package, list(sys.meta_path)
    if find_spec(package) is None:
        assert plugin.register() == {}
    monkeypatch.setattr(torch.version, "cuda", None)
    write(tmp_path, package)
    with importable(tmp_path, package):
        assert plugin.register() == {} and not any(map(ours, held(package).values()))
    assert sys.meta_path == path


@pytest.mark.parametrize("package", PLUGINS)
@pytest.mark.parametrize(
    ("changed", "words"),
    [("{}, more=None", "its parameters differ from those of {} {}:"), (None, "the function does not exist; ssmgen was written for")],
    ids=["parameters", "missing"],
)
def test_a_function_that_has_drifted_is_left_and_said(package, changed, words, tmp_path, monkeypatch, caplog):
    """Others are replaced, each for itself."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    place = of(package)[0]
    write(tmp_path, package, "99.1", {place: changed and changed.format(SIGNATURES[place])})
    with importable(tmp_path, package):
        try:
            PLUGINS[package].register()
            found = {p: place_of(*p) for p in of(package)}
            outcome = PLUGINS[package].register()
        finally:
            PLUGINS[package].unregister()
    assert found[place] is None or not ours(found[place])
    assert all(ours(f) for p, f in found.items() if p != place)
    assert words.format(package, VERSIONS[package]) in outcome[".".join(place)] and ".".join(place) in caplog.text
    assert f"written for {package} {VERSIONS[package]}, and this is 99.1" in caplog.text


@pytest.mark.parametrize(("version", "said"), [("{}", False), ("{}+cu130", False), ("{}.post1", True)])
def test_other_versions_are_said(version, said, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    write(tmp_path, "vllm", version.format(VERSIONS["vllm"]))
    with importable(tmp_path, "vllm"):
        vllm.register()
        vllm.unregister()
    assert ("written for vllm" in caplog.text) == said


def test_a_module_that_is_gone_is_said_at_once(engine, tmp_path, caplog):
    module, name = of(engine)[0]
    tmp_path.joinpath(*module.split(".")).with_suffix(".py").unlink()
    outcome = PLUGINS[engine].register()
    for gone in [f"{m}.{n}" for m, n in of(engine) if m == module]:
        assert "the module does not exist" in outcome.pop(gone) and gone in caplog.text
    assert set(outcome.values()) == {replacing.WAITING}


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_done_is_logged_once_below_the_engine_s_logger(engine, when, caplog, monkeypatch):
    (module, kept), *others = of(engine)
    monkeypatch.setenv("SSMGEN_ENGINE_KEEP", kept)
    if when == "after":
        modules_of(engine)
    with caplog.at_level("INFO", logger=engine):
        PLUGINS[engine].register()
        modules_of(engine)
    said = sorted(r.getMessage() for r in caplog.records if r.name == f"{engine}.ssmgen")
    assert said == sorted(
        [f"ssmgen does not replace {module}.{kept}: SSMGEN_ENGINE_KEEP names it", *(f"ssmgen replaces {'.'.join(p)}" for p in others)]
    )


# Calls.


def with_ours(monkeypatch, engine: str, function, needs: tuple[str, ...] = ()):
    """(the engine's first function, whose replacement calls `function`; the value that the engine's own returns)"""
    r, *others = PLUGINS[engine]._ENGINE.replacements

    def made(*args, **kwargs):
        return function(*args, **kwargs)

    made.__signature__ = inspect.signature(r.function)
    monkeypatch.setattr(PLUGINS[engine]._ENGINE, "replacements", (replacing.Replacement(r.module, r.name, made, needs=needs), *others))
    PLUGINS[engine].register()
    return getattr(importlib.import_module(r.module), r.name), answer(r.module, r.name)


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError("f", ["x is [2]; expected [3]"]), UnsupportedError("f", ["trees"]), CaptureError("spec", "sm_90a", "f"),
        NotBuiltError("spec", "sm_90a"),
    ],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_refused_calls_go_to_the_engine_and_are_said_once(engine, error, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise error

    function, engine_s = with_ours(monkeypatch, engine, refuse)
    arguments = [None] * 8
    assert [function(*arguments), function(*arguments)] == [engine_s, engine_s]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and str(error) in warnings[0] and f"{engine}'s own" in warnings[0]
    assert ("In an engine, run a step of the same batch size before the capture" in warnings[0]) == isinstance(error, CaptureError)


def test_other_reasons_are_said_too(engine, monkeypatch, caplog):
    """A warning in an engine's warm-up must not silence later warnings of requests. Different numbers do not make a new reason."""
    reasons = iter(["x is [2]; expected [3]", "x is [41]; expected [3]", "x is on cpu", "x is [2]; expected [3]"])

    def refuse(*args, **kwargs):
        raise ArgumentError("f", [next(reasons)])

    function, engine_s = with_ours(monkeypatch, engine, refuse)
    assert [function(*[None] * 8) for _ in range(4)] == [engine_s] * 4
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 2 and "x is [2]" in said[0] and "x is on cpu" in said[1]


def test_other_errors_are_raised(engine, monkeypatch):
    def fail(*args, **kwargs):
        raise LaunchError("spec", "illegal address", 1, 32, "")

    function, _ = with_ours(monkeypatch, engine, fail)
    with pytest.raises(LaunchError):
        function(*[None] * 8)


# Being found.


def test_entry_points_are_the_register_functions():
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    assert groups == {
        "vllm.general_plugins": {"ssmgen": "ssmgen.compat.vllm:register"},
        "sglang.srt.plugins": {"ssmgen": "ssmgen.compat.sglang:register"},
    }
    for group in groups.values():
        module, _, name = group["ssmgen"].partition(":")
        assert getattr(importlib.import_module(module), name) in (vllm.register, sglang.register)
