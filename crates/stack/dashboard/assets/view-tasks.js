// Tasks: what runs and what ran, with the steps of each.

import { h } from "./dom.js";
import { all, byUuid } from "./store.js";
import { dateOf, seconds, when } from "./format.js";
import { paged, table } from "./table.js";
import { button, cancelTask } from "./actions.js";
import { errorBox } from "./errors.js";
import { ApiError } from "./api.js";
import { timeline } from "./timeline.js";

const COLOUR = { success: "good", failure: "bad", cancelled: "warn", cancelling: "warn" };
const badge = (task) => h("span", { class: `badge ${COLOUR[task.status] ?? ""}` }, task.status);
const runs = (task) => task.status === "pending" || task.status === "cancelling";
const cancel = (task) => runs(task) && button("Cancel", () => cancelTask(task), { role: "read-only",
  why: (task.allowed_operations ?? []).includes("cancel") ? "" : "The task cannot be cancelled now; it ends by itself." });
const took = (task) => (runs(task) ? "runs" : seconds(Math.max(0, dateOf(task.finished) - dateOf(task.created)) / 1000));

export function tasks(redraw) {
  const found = all("task").sort((a, b) => Number(runs(b)) - Number(runs(a)) || String(b.created).localeCompare(String(a.created)));
  const rows = paged("tasks", found, redraw, { noun: "task" });
  return { title: "Tasks", body: [h("section", { class: "card" }, h("div", { class: "tools" }, rows.filter), table("Tasks", [
    ["Task", (task) => h("a", { href: `#/task/${task.uuid}` }, task.name_label || task.uuid)], ["State", badge],
    ["Progress", (task) => h("div", { class: "bar" }, h("progress", { max: 1, value: task.progress, "aria-label": `Progress of ${task.name_label}` }))],
    ["Begun", (task) => when(task.created)], ["Took", took, true], ["", cancel],
  ], rows.rows), rows.pages)] };
}

export function task(uuid, redraw) {
  const here = byUuid("task", uuid);
  if (!here) return { title: "Task", body: [h("p", {}, "The task is no longer known; ended tasks are forgotten after a while."), h("a", { href: "#/tasks" }, "All tasks")] };
  const [code, ...params] = here.error_info ?? [];
  return { title: here.name_label || uuid, about: here.name_description, actions: [cancel(here)],
    body: [h("section", { class: "card" }, h("dl", { class: "facts" }, [["State", badge(here)], ["Begun", when(here.created)], ["Took", took(here)], ["UUID", h("code", {}, uuid)]]
      .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), code && errorBox(new ApiError(code, params), here.name_label)),
    h("section", { class: "card" }, h("h2", {}, "Steps"), timeline(here, redraw))] };
}
