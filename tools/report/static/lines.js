"use strict";
// Differences of two lists, by their longest common subsequence. No page is touched here.

// The longest common subsequence, as ascending pairs [index in a, index in b].
function commonPairs(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let endA = a.length, endB = b.length;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) { endA--; endB--; }

  const pairs = [];
  for (let i = 0; i < start; i++) pairs.push([i, i]);
  const rows = endA - start, columns = endB - start, width = columns + 1;
  // length[i * width + j]: of the longest one of a[start + i ..] and b[start + j ..]; texts have fewer than 65536 lines.
  const length = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i--)
    for (let j = columns - 1; j >= 0; j--)
      length[i * width + j] = a[start + i] === b[start + j]
        ? length[(i + 1) * width + j + 1] + 1
        : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (a[start + i] === b[start + j]) pairs.push([start + i++, start + j++]);
    else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
    else j++;
  }
  for (let k = 0; k < a.length - endA; k++) pairs.push([endA + k, endB + k]);
  return pairs;
}

// Rows [index in a or null, index in b or null, whether they are equal]: what changed between two common lines stands side by side.
function sideBySide(a, b) {
  const rows = [];
  let i = 0, j = 0;
  for (const [nextA, nextB] of [...commonPairs(a, b), [a.length, b.length]]) {
    while (i < nextA || j < nextB) rows.push([i < nextA ? i++ : null, j < nextB ? j++ : null, false]);
    if (nextA < a.length) { rows.push([nextA, nextB, true]); i = nextA + 1; j = nextB + 1; }
  }
  return rows;
}

// [[part of a, whether b has it too], ...] and the same of b, word by word.
function wordDifferences(a, b) {
  const wordsA = a.match(/\w+|\s+|[^\w\s]/g) || [], wordsB = b.match(/\w+|\s+|[^\w\s]/g) || [];
  const pairs = commonPairs(wordsA, wordsB);
  const marked = (words, kept) => words.map((word, i) => [word, kept.has(i)]);
  return [marked(wordsA, new Set(pairs.map(p => p[0]))), marked(wordsB, new Set(pairs.map(p => p[1])))];
}
