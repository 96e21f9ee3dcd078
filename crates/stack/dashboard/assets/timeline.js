// The steps of a task as bars: grey while they wait for their turn, coloured while they work.

import { call } from "./api.js";
import { h, s } from "./dom.js";
import { seconds } from "./format.js";

const known = new Map();
const WIDTH = 760, NAMES = 230, ROW = 24, STEPS_MAX = 200;

function fetchSteps(task, redraw) {
  const version = `${task.status} ${task.progress}`;
  const have = known.get(task.ref);
  if (have?.version === version) return have.steps;
  known.set(task.ref, { version, steps: have?.steps });
  call("task.get_timeline", task.ref).then((text) => {
    known.set(task.ref, { version, steps: text ? JSON.parse(text) : null });
    redraw();
  }).catch(() => known.set(task.ref, { version, steps: null }));
  return have?.steps;
}

const short = (text) => text.replace(/([0-9a-f]{8})-[0-9a-f-]{27}/g, "$1");

function bar(step, row, end) {
  const x = (us) => NAMES + (WIDTH - NAMES - 70) * (us / end);
  const began = step.queued_us + step.wait_us, y = row * ROW;
  const name = short(`${step.undo ? "undo " : ""}${step.name} ${step.subject}`);
  return s("g", {}, s("title", {}, `${name}: waited ${seconds(step.wait_us / 1e6)}, worked ${seconds(step.work_us / 1e6)}, ${step.result}${step.error ? `: ${step.error}` : ""}`),
    s("text", { x: 0, y: y + 15 }, name.length > 36 ? `${name.slice(0, 35)}…` : name),
    s("rect", { class: "wait", x: x(step.queued_us), y: y + 8, width: Math.max(0, x(began) - x(step.queued_us)), height: 6, rx: 2 }),
    s("rect", { class: `work ${step.result}`, x: x(began), y: y + 4, width: Math.max(2, x(began + step.work_us) - x(began)), height: 14, rx: 3 }),
    s("text", { x: x(began + step.work_us) + 6, y: y + 15 }, seconds(step.work_us / 1e6)));
}

export function timeline(task, redraw) {
  const steps = fetchSteps(task, redraw);
  if (!steps?.steps?.length) return h("p", { class: "empty" }, "This task has no steps that were kept: it was one piece of work, or it ended before the daemon began.");
  const shown = steps.steps.slice(0, STEPS_MAX);
  const end = Math.max(1, steps.total_us, ...shown.map((step) => step.queued_us + step.wait_us + step.work_us));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Steps" },
    s("svg", { width: WIDTH, height: shown.length * ROW, viewBox: `0 0 ${WIDTH} ${shown.length * ROW}`, role: "img",
      "aria-label": `${steps.operation}: ${steps.steps.length} steps in ${seconds(steps.total_us / 1e6)}. ${shown.map((step) => `${step.name} ${step.result} ${seconds(step.work_us / 1e6)}`).slice(0, 20).join(", ")}` },
      shown.map((step, row) => bar(step, row, end))));
}
