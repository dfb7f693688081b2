"use strict";
// The index's search box. A variant is found when every word is in its name, spec, architecture, models or rules, or
// is "spills" or "timed" and true of it.

const MOST = 50;  // results to show
const box = document.getElementById("search"), list = document.getElementById("results"), found = document.getElementById("found");
const known = window.ssmgenVariants.map(v => [v, [v.name, v.arch, v.spec, v.models.join(" "), v.words.join(" ")].join(" ").toLowerCase()]);

function result(v) {
  const item = document.createElement("li"), link = document.createElement("a"), note = document.createElement("small");
  link.href = `variants/${v.arch}/${v.name}.html`;
  link.textContent = v.name;
  link.className = "name";
  note.textContent = [v.family, v.arch, ...v.models.slice(0, 3), ...(v.models.length > 3 ? [`${v.models.length - 3} more models`] : [])].join(" · ");
  item.append(link, note);
  return item;
}

function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = words.length ? known.filter(([, text]) => words.every(word => text.includes(word))).map(([v]) => v) : [];
  list.replaceChildren(...hits.slice(0, MOST).map(result));
  found.textContent = words.length ? `${hits.length} of ${known.length} variants` + (hits.length > MOST ? `, the first ${MOST}` : "") : "";
  history.replaceState(null, "", words.length ? `#${encodeURIComponent(box.value)}` : "#");
}

box.oninput = search;
box.value = decodeURIComponent(location.hash.slice(1));
search();
