// Chains of images as trees: bases on the left, what was made from them on the right.

import { h, s } from "./dom.js";
import { all, get } from "./store.js";
import { bytes, byName } from "./format.js";

const WIDE = 180, HIGH = 46, GAP_X = 44, GAP_Y = 12;
const NODES_MAX = 200;

/** Trees of the VDIs of an SR that have more than one image. */
export function families(sr) {
  const vdis = all("VDI").filter((vdi) => vdi.SR === sr);
  const children = new Map();
  const roots = [];
  for (const vdi of vdis) {
    const parent = get("VDI", vdi.parent);
    if (parent && parent.SR === sr) children.set(parent.ref, [...(children.get(parent.ref) ?? []), vdi]);
    else roots.push(vdi);
  }
  return { children, roots: roots.filter((root) => children.has(root.ref)).sort(byName) };
}

/** The root of a disk's chain. */
export function rootOf(vdi) {
  let root = vdi;
  for (let step = 0; step < 1000; step += 1) {
    const parent = get("VDI", root.parent);
    if (!parent) break;
    root = parent;
  }
  return root;
}

const label = (vdi) => vdi.name_label || (vdi.managed ? vdi.uuid.slice(0, 8) : "base copy");

function place(root, children) {
  const nodes = [], links = [];
  let rows = 0;
  const walk = (vdi, depth) => {
    if (nodes.length >= NODES_MAX) return null;
    const node = { vdi, depth, row: 0 };
    nodes.push(node);
    const below = (children.get(vdi.ref) ?? []).map((child) => walk(child, depth + 1)).filter(Boolean);
    node.row = below.length ? (below[0].row + below.at(-1).row) / 2 : rows++;
    below.forEach((child) => links.push([node, child]));
    return node;
  };
  walk(root, 0);
  return { nodes, links, rows };
}

function drawn({ vdi, depth, row }, current) {
  const kinds = [!vdi.managed && "base", vdi.is_a_snapshot && "snap", (vdi.VBDs ?? []).some((vbd) => get("VBD", vbd)?.currently_attached) && "used"];
  const kind = !vdi.managed ? "base copy" : vdi.is_a_snapshot ? "snapshot" : "disk";
  const at = `translate(${2 + depth * (WIDE + GAP_X)} ${2 + row * (HIGH + GAP_Y)})`;
  const name = label(vdi);
  return s("a", { href: `#/vdi/${vdi.uuid}`, "aria-label": `${kind} ${name}, ${bytes(vdi.physical_utilisation)} in use`, "aria-current": vdi === current && "true" },
    s("g", { class: ["node", ...kinds.filter(Boolean)].join(" "), transform: at },
      s("title", {}, `${name} (${vdi.uuid})`),
      s("rect", { width: WIDE, height: HIGH, rx: 8, "stroke-width": vdi === current ? 3 : undefined }),
      s("text", { class: "name", x: 10, y: 19 }, name.length > 24 ? `${name.slice(0, 23)}…` : name),
      s("text", { x: 10, y: 36 }, `${kind} · ${bytes(vdi.physical_utilisation)} of ${bytes(vdi.virtual_size)}`)));
}

/** One tree. */
export function tree(root, children, current) {
  const { nodes, links, rows } = place(root, children);
  const width = (Math.max(...nodes.map((node) => node.depth)) + 1) * (WIDE + GAP_X) - GAP_X + 4;
  const height = rows * (HIGH + GAP_Y) - GAP_Y + 4;
  const end = (node) => 2 + node.row * (HIGH + GAP_Y) + HIGH / 2;
  const curve = ([a, b]) => {
    const from = 2 + a.depth * (WIDE + GAP_X) + WIDE, to = 2 + b.depth * (WIDE + GAP_X);
    return s("path", { class: "link", d: `M${from} ${end(a)}C${from + GAP_X / 2} ${end(a)} ${to - GAP_X / 2} ${end(b)} ${to} ${end(b)}` });
  };
  return h("div", { class: "chain" }, s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Chain of ${label(root)}: ${nodes.length} images` },
    links.map(curve), nodes.map((node) => drawn(node, current))));
}
