"use strict";
// The page that shows two variants side by side. What is compared stands in the address: #a=...&b=...&form=cu

const AROUND = 3;  // equal lines that stay in sight around a change
const $ = id => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function cell(number, parts, kind) {
  const line = element("div", `line ${kind}`);
  line.append(element("span", "at", number === null ? "" : String(number + 1)));
  const text = element("span", "text");
  for (const [part, same] of parts) text.append(same ? document.createTextNode(part) : element("mark", "", part));
  line.append(text);
  return line;
}

function rowOf(a, b, [i, j, equal]) {
  const row = element("div", equal ? "row equal" : "row");
  let left = i === null ? [] : [[a[i], true]], right = j === null ? [] : [[b[j], true]];
  if (!equal && i !== null && j !== null) [left, right] = wordDifferences(a[i], b[j]);
  row.append(cell(i, left, equal ? "" : i === null ? "none" : "removed"), cell(j, right, equal ? "" : j === null ? "none" : "added"));
  return row;
}

function show(a, b) {
  const rows = sideBySide(a, b), box = $("diff"), near = new Array(rows.length).fill(false);
  rows.forEach(([, , equal], k) => {
    if (!equal) near.fill(true, Math.max(0, k - AROUND), k + AROUND + 1);
  });
  box.replaceChildren();
  for (let k = 0; k < rows.length;) {
    if (near[k]) { box.append(rowOf(a, b, rows[k++])); continue; }
    let end = k;
    while (end < rows.length && !near[end]) end++;
    const hidden = rows.slice(k, end), button = element("button", "more", `${hidden.length} equal lines`);
    button.type = "button";
    button.onclick = () => button.replaceWith(...hidden.map(row => rowOf(a, b, row)));
    box.append(button);
    k = end;
  }
  const removed = rows.filter(([i, , equal]) => !equal && i !== null).length, added = rows.filter(([, j, equal]) => !equal && j !== null).length;
  $("summary").textContent = removed + added ? `${removed} lines only on the left, ${added} only on the right` : "The same text.";
}

// A form's texts come from a script of their own, when they are first asked for.
function withTexts(form, then) {
  if (window[`ssmgen_${form}`]) { then(window[`ssmgen_${form}`]); return; }
  const script = document.createElement("script");
  script.src = `${window.ssmgenData}.${form}.js`;
  script.onload = () => then(window[`ssmgen_${form}`]);
  script.onerror = () => { $("summary").textContent = `${script.src} cannot be read.`; };
  document.head.append(script);
}

function compare() {
  const [a, b, form] = ["a", "b", "form"].map(id => $(id).value);
  $("page-a").href = `../variants/${a}.html`;
  $("page-b").href = `../variants/${b}.html`;
  history.replaceState(null, "", `#a=${a}&b=${b}&form=${form}`);
  withTexts(form, texts => {
    if (texts[a] === undefined || texts[b] === undefined) {
      $("diff").replaceChildren();
      $("summary").textContent = "There is no SASS: nvdisasm was not there when this report was made.";
    } else show(texts[a].trimEnd().split("\n"), texts[b].trimEnd().split("\n"));
  });
}

function choose() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (!asked.get("b") && $("b").options.length > 1) $("b").selectedIndex = 1;
  for (const id of ["a", "b", "form"])
    if ([...$(id).options].some(option => option.value === asked.get(id))) $(id).value = asked.get(id);
  compare();
}

$("swap").onclick = () => { [$("a").value, $("b").value] = [$("b").value, $("a").value]; compare(); };
$("choice").onchange = compare;
addEventListener("hashchange", choose);
choose();
