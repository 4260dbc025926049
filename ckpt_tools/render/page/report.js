"use strict";
// Everything from the file is put in with textContent; nothing is ever parsed as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function sizeText(count) {
  if (count < 1024) return `${count} B`;
  let unit = -1;
  do { count /= 1024; unit += 1; } while (count >= 1024 && unit < 4);
  return `${count < 100 ? count.toFixed(1) : count.toFixed(0)} ${["KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

function number(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  return value && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : Number(value.toPrecision(4)).toString();
}

function definitions(rows) {
  const list = make("dl");
  for (const [term, text] of rows) list.append(make("dt", term), make("dd", text));
  return list;
}

function listTable(headings, rows, numeric = []) {
  const table = make("table", null, "list");
  const head = table.createTHead().insertRow();
  headings.forEach((heading, index) => {
    const cell = make("th", heading, numeric.includes(index) ? "number" : null);
    cell.scope = "col";
    head.append(cell);
  });
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((text, index) => line.append(make("td", text, numeric.includes(index) ? "number" : "mono")));
  }
  const scroll = make("div", null, "scroll");
  scroll.append(table);
  return scroll;
}

// --- overview, findings, values

function showOverview() {
  byId("overview").append(definitions(data.overview));
  byId("legend").textContent = data.legend;
  byId("legend").hidden = !data.legend;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function showFindings() {
  for (const finding of data.findings) {
    const box = make("div", null, `finding ${finding.severity}`);
    const what = make("p");
    what.append(make("span", `${finding.severity}${finding.where ? ` in ${finding.where}` : ""}: `, "severity"), finding.found);
    box.append(what);
    if (finding.expected) box.append(make("p", `expected: ${finding.expected}`, "dim"));
    if (finding.fix) {
      const line = make("div", null, "command");
      const button = make("button", "Copy");
      button.setAttribute("aria-label", `Copy the command: ${finding.fix}`);
      button.addEventListener("click", () => copy(finding.fix, button));
      line.append(make("code", finding.fix), button);
      box.append(line);
    }
    byId("findings").append(box);
  }
  byId("findings").hidden = !data.findings.length;
}

function showPairs(id, headings, rows) {
  byId(id).hidden = !rows.length;
  if (rows.length) byId(id).append(listTable(headings, rows));
}

// --- differences

function showDifference() {
  const found = data.difference;
  if (!found) return;
  const section = byId("difference");
  section.hidden = false;
  section.append(definitions([["other", found.other]]), make("p", found.summary, `summary ${found.same ? "same" : "differs"}`));
  for (const block of found.blocks) {
    const box = make("details");
    box.open = block.rows.length <= 12;
    box.append(make("summary", `${block.title} (${block.count.toLocaleString("en")})`));
    box.append(listTable(block.headings, block.rows, block.numeric));
    if (block.count > block.rows.length) box.append(make("p", `${block.count - block.rows.length} more: ckpt diff --all`, "dim"));
    section.append(box);
  }
}

// --- treemap: squarified, after Bruls, Huizing and van Wijk (2000)

const separator = ".";
const mostLevels = 32;
let tree = null;

function buildTree() {
  const root = { name: "all", path: "", bytes: 0, count: 0, children: new Map() };
  data.tensors.name.forEach((name, index) => {
    const bytes = data.tensors.bytes[index];
    let node = root;
    node.bytes += bytes; node.count += 1;
    const all = name.split(separator);
    const parts = all.length > mostLevels ? [...all.slice(0, mostLevels), all.slice(mostLevels).join(separator)] : all;
    parts.forEach((part, level) => {
      if (!node.children.has(part)) {
        node.children.set(part, { name: part, path: parts.slice(0, level + 1).join(separator), bytes: 0, count: 0, children: new Map(), parent: node });
      }
      node = node.children.get(part);
      node.bytes += bytes; node.count += 1;
    });
  });
  return root;
}

function squarify(items, x, y, width, height) {
  const placed = [];
  let rest = items.slice();
  let area = (width * height) / rest.reduce((sum, item) => sum + item.bytes, 0);
  const worst = (row, side) => {
    const sum = row.reduce((total, item) => total + item.bytes * area, 0);
    return Math.max(...row.map((item) => Math.max((side * side * item.bytes * area) / (sum * sum), (sum * sum) / (side * side * item.bytes * area))));
  };
  while (rest.length) {
    const side = Math.min(width, height);
    const row = [rest.shift()];
    while (rest.length && worst([...row, rest[0]], side) <= worst(row, side)) row.push(rest.shift());
    const thickness = row.reduce((sum, item) => sum + item.bytes * area, 0) / side;
    let offset = 0;
    for (const item of row) {
      const length = (item.bytes * area) / thickness;
      placed.push(width >= height ? [item, x, y + offset, thickness, length] : [item, x + offset, y, length, thickness]);
      offset += length;
    }
    if (width >= height) { x += thickness; width -= thickness; } else { y += thickness; height -= thickness; }
  }
  return placed;
}

const mostTiles = 80;

function tilesOf(node) {
  const all = [...node.children.values()].filter((child) => child.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const shown = all.slice(0, mostTiles);
  const left = all.slice(mostTiles);
  if (left.length) shown.push({ name: `${left.length} more`, path: null, bytes: left.reduce((sum, child) => sum + child.bytes, 0), children: new Map() });
  return shown;
}

function only(node) {  // a chain of single children is passed through: module.encoder. ...
  while (node.children.size === 1) node = [...node.children.values()][0];
  return node;
}

function fill(tile, child, width, height) {  // its name, and under it what is in it
  if (width < 36 || height < 18) return;
  const label = make("span", null, "label");
  label.append(make("b", child.name), ` ${sizeText(child.bytes)}`);
  tile.append(label);
  const below = only(child);
  if (width < 90 || height < 60 || !below.children.size) return;
  for (const [item, x, y, w, h] of squarify(tilesOf(below), 4, 22, width - 10, height - 28)) {
    if (w < 3 || h < 3) continue;
    const inner = make("span", w > 40 && h > 16 ? item.name : null, "inner");
    Object.assign(inner.style, { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
    tile.append(inner);
  }
}

function showTree(node, focus) {
  const field = byId("treemap");
  const crumbs = byId("crumbs");
  field.replaceChildren();
  crumbs.replaceChildren();
  const path = [];
  for (let up = node; up; up = up.parent) path.unshift(up);
  path.forEach((step, index) => {
    if (index) crumbs.append(" › ");
    const button = make("button", step.name);
    button.addEventListener("click", () => showTree(step, true));
    if (step === node) button.setAttribute("aria-current", "true");
    crumbs.append(button);
  });
  crumbs.append(make("span", ` ${sizeText(node.bytes)}, ${node.count.toLocaleString("en")} tensor${node.count === 1 ? "" : "s"}`, "dim"));
  const width = field.clientWidth;
  squarify(tilesOf(node), 0, 0, width, field.clientHeight).forEach(([child, x, y, w, h], index) => {
    const tile = make("button", null, `tile c${index % 8}`);
    const label = `${child.name}, ${sizeText(child.bytes)}, ${((100 * child.bytes) / node.bytes).toFixed(1)}%`;
    Object.assign(tile.style, { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
    fill(tile, child, w, h);
    tile.title = label;
    tile.setAttribute("aria-label", label);
    tile.addEventListener("click", () => {
      if (child.children.size) showTree(only(child).children.size ? only(child) : child, true);
      else if (child.path !== null) search(child.path);
    });
    field.append(tile);
  });
  if (focus) { const first = field.querySelector("button"); if (first) first.focus({ preventScroll: true }); }
  field.onkeydown = (event) => {
    if ((event.key === "Escape" || event.key === "Backspace") && node.parent) { event.preventDefault(); showTree(node.parent, true); }
  };
  tree = node;
}

function showSizes() {
  const root = buildTree();
  byId("sizes").hidden = root.bytes === 0;
  if (root.bytes === 0) return;
  showTree(only(root).children.size ? only(root) : root, false);
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => showTree(tree, false)); });
}

// --- the table of tensors: only the rows that are in view exist

const rowHeight = 28;
const tensors = data.tensors;
const columns = data.columns;
let order = [];
let sorted = { column: null, down: false };
let drawn = "";

const cellText = (column, index) => {
  const value = tensors[column.key][index];
  if (column.kind === "bytes") return sizeText(value);
  if (column.kind === "number") return number(value);
  if (column.kind === "percent") return value === null ? "-" : `${Number((100 * value).toPrecision(3))}%`;
  if (column.kind === "choice") return data.choices[column.key][value];
  return value === null ? "-" : String(value);
};

const svg = (tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

function histogram(counts, className) {
  const picture = svg("svg", { viewBox: `0 0 ${counts.length * 10} 100`, preserveAspectRatio: "none", class: className, "aria-hidden": "true" });
  const most = Math.max(...counts);
  counts.forEach((count, index) => {
    const height = count ? Math.max(3, (100 * count) / most) : 0;
    picture.append(svg("rect", { x: index * 10 + 0.5, y: 100 - height, width: 9, height }));
  });
  return picture;
}

function showDetail(index) {
  const box = byId("detail");
  box.hidden = false;
  box.replaceChildren(make("h3", tensors.name[index], "mono"));
  box.append(definitions(columns.filter((column) => column.key !== "name" && column.kind !== "histogram")
    .map((column) => [column.title, column.kind === "bytes" ? `${cellText(column, index)} (${tensors.bytes[index].toLocaleString("en")} B)` : cellText(column, index)])));
  const counts = tensors.histogram && tensors.histogram[index];
  if (counts && counts.length) {
    const ends = make("div", null, "ends");
    ends.append(make("span", number(tensors.min[index])), make("span", number(tensors.max[index])));
    box.append(histogram(counts, "histogram"), ends);
  }
}

function shortName(name) {  // on a phone the end of a name tells more than its beginning
  return window.innerWidth <= 600 && name.length > 18 ? `\u2026${name.slice(-17)}` : name;
}

function makeRow(index, position) {
  const row = make("div", null, tensors.odd && tensors.odd[index] ? "row odd" : "row");
  row.setAttribute("role", "row");
  row.setAttribute("aria-rowindex", position + 2);
  row.style.gridTemplateColumns = grid;
  for (const column of columns) {
    const cell = make("div", null, column.right ? "cell number" : "cell");
    cell.setAttribute("role", "cell");
    if (column.key === "name") {
      const button = make("button", shortName(tensors.name[index]), "mono");
      button.title = tensors.name[index];
      button.addEventListener("click", () => showDetail(index));
      cell.append(button);
    } else if (column.kind === "histogram") {
      if (tensors.histogram[index].length) cell.append(histogram(tensors.histogram[index], "small"));
    } else {
      cell.textContent = cellText(column, index);
      cell.title = cell.textContent;
    }
    row.append(cell);
  }
  return row;
}

function draw() {
  const view = byId("table");
  const first = Math.max(0, Math.floor(view.scrollTop / rowHeight) - 10);
  const last = Math.min(order.length, first + Math.ceil(view.clientHeight / rowHeight) + 20);
  const key = `${first} ${last}`;
  if (key === drawn) return;
  drawn = key;
  byId("rows").style.transform = `translateY(${first * rowHeight}px)`;
  byId("rows").replaceChildren(...order.slice(first, last).map((index, offset) => makeRow(index, first + offset)));
}

function matcher(text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted.includes("*")) return (line) => line.includes(wanted);
  const parts = wanted.split("*");
  return (line) => {  // by hand: a pattern of many * would make a regular expression try for ever
    let at = 0;
    for (const part of parts) { const found = line.indexOf(part, at); if (found < 0) return false; at = found + part.length; }
    return true;
  };
}

let haystack = null;

function refresh() {
  haystack ??= tensors.name.map((name, index) =>
    columns.filter((column) => ["text", "choice"].includes(column.kind)).map((column) => cellText(column, index)).join(" ").toLowerCase());
  const matches = matcher(byId("search").value);
  order = [];
  for (let index = 0; index < haystack.length; index += 1) if (matches(haystack[index])) order.push(index);
  if (sorted.column) {
    const { key, kind } = sorted.column;
    const values = kind === "choice" ? tensors[key].map((choice) => data.choices[key][choice]) : tensors[key];
    const sign = sorted.down ? -1 : 1;
    const text = ["text", "choice"].includes(kind);
    const order_ = text ? new Intl.Collator("en", { numeric: true }) : null;
    order.sort((a, b) => {
      if (text) return sign * order_.compare(values[a], values[b]) || a - b;
      if (values[a] === null || values[b] === null) return (values[a] === null) - (values[b] === null) || a - b;
      return sign * (values[a] - values[b]) || a - b;
    });
  }
  drawn = "";
  byId("body").style.height = `${order.length * rowHeight}px`;
  byId("table").setAttribute("aria-rowcount", order.length + 1);
  byId("count").textContent = `${order.length.toLocaleString("en")} of ${tensors.name.length.toLocaleString("en")}`;
  draw();
}

function search(text) {
  byId("search").value = text;
  byId("table").scrollTop = 0;
  refresh();
  byId("search").scrollIntoView({ block: "center" });
}

let grid = "";

function showHead() {
  const narrow = window.innerWidth <= 600;
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const others = columns.reduce((sum, column) => sum + column.width * rem, 0);
  const room = byId("table").clientWidth - others;  // one width for all rows: each is a grid of its own
  grid = columns.map((column) => (column.key === "name" ? `${Math.max((narrow ? 11 : 20) * rem, room)}px` : `${column.width}rem`)).join(" ");
  const head = byId("head");
  head.style.gridTemplateColumns = grid;
  head.replaceChildren(...columns.map((column) => {
    const cell = make("div", null, column.right ? "cell number" : "cell");
    cell.setAttribute("role", "columnheader");
    cell.setAttribute("aria-sort", sorted.column === column ? (sorted.down ? "descending" : "ascending") : "none");
    if (column.kind === "histogram") { cell.textContent = column.title; return cell; }
    const button = make("button", column.title);
    button.addEventListener("click", () => {
      const numeric = !["text", "choice"].includes(column.kind);
      sorted = { column, down: sorted.column === column ? !sorted.down : numeric };
      showHead();
      refresh();
      head.children[columns.indexOf(column)].querySelector("button").focus();
    });
    cell.append(button);
    return cell;
  }));
}

function showTensors() {
  showHead();
  byId("search").addEventListener("input", () => { byId("table").scrollTop = 0; refresh(); });
  byId("table").addEventListener("scroll", draw, { passive: true });
  window.addEventListener("resize", () => { showHead(); drawn = ""; draw(); });
  refresh();
}

showOverview();
showFindings();
showDifference();
showSizes();
showTensors();
showPairs("values", ["value", "is"], data.values);
showPairs("objects", ["object", "of class"], data.objects);
document.documentElement.dataset.ready = "true";
