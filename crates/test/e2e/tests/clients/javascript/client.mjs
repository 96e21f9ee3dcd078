// A backup product in JavaScript, by the npm package `xen-api` as it is: client.mjs MODULES URL TRANSPORT
//
// MODULES has the package, URL an account and the server's address. The product logs in, lists, watches events, makes a
// VDI, imports its contents, keeps them in a snapshot and exports that, and compares each byte.
import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { Readable } from "node:stream";
import { pathToFileURL } from "node:url";

const [modules, url, transport] = process.argv.slice(2);
const { createClient } = await import(pathToFileURL(`${modules}/node_modules/xen-api/index.mjs`));
const MIB = 1 << 20;
const LIMIT_MS = 60_000;
const warn = console.warn;
// It says of each stream that its length is not known, which is what is tried here.
console.warn = (...words) => words.includes("missing length") || warn(...words);

const xapi = createClient({ allowUnauthorized: true, debounce: 20, transport, url });
const sum = (bytes) => createHash("sha256").update(bytes).digest("hex");

/** Waits for an object of the cache, which events alone keep up to date. */
async function seen(what, find) {
  const until = Date.now() + LIMIT_MS;
  for (;;) {
    const found = Object.values(xapi.objects.all).find(find);
    if (found !== undefined) return found;
    assert(Date.now() < until, `${what} is not seen by events`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

async function exported(vdi) {
  const { body } = await xapi.getResource("/export_raw_vdi/", { query: { format: "raw", vdi }, task: true });
  const pieces = [];
  for await (const piece of body) pieces.push(piece);
  return Buffer.concat(pieces);
}

async function refused(code, ...call) {
  const error = await xapi.call(...call).then(() => undefined, (error) => error);
  assert.equal(error?.code, code, `${call}: ${error}`);
  return error.params;
}

// Log in, and list.
await xapi.connect();
await xapi.objectsFetched;
const all = Object.values(xapi.objects.all);
const [pool] = all.filter((object) => object.$type === "pool");
assert.equal(xapi.pool.$ref, pool.$ref);
for (const type of ["host", "SR", "VM", "PBD"]) assert(all.some((object) => object.$type === type), type);
const hosts = await xapi.getAllRecords("host");
assert.equal(hosts.length, 1);
assert.equal(typeof hosts[0].enabled, "boolean");

// Watch: a change of another session comes as an event, and barriers hold.
const label = `of ${transport} ${Date.now()}`;
await xapi.setFieldEntry("pool", pool.$ref, "other_config", "seen-by", label);
const changed = await xapi.barrier(pool.$ref);
assert.equal(changed.other_config["seen-by"], label);

// Create.
const ref = await xapi.call("VDI.create", {
  SR: pool.default_SR, name_label: label, name_description: "", other_config: {}, read_only: false, sharable: false,
  sm_config: {}, tags: ["one"], type: "user", virtual_size: 8 * MIB, xenstore_data: {},
});
const vdi = await seen("a new VDI", (object) => object.$ref === ref);
assert.equal(vdi.name_label, label);
assert.equal(Number(vdi.virtual_size), 8 * MIB);

// Import: of a known length, and of a stream whose length is not known.
const first = Buffer.concat([randomBytes(3 * MIB), Buffer.alloc(5 * MIB)]);
await xapi.putResource(first, "/import_raw_vdi/", { query: { format: "raw", vdi: ref }, task: true });
assert.equal(sum(await exported(ref)), sum(first));

// Snapshot, by a task that events end; the disk goes on.
const snapshot = await xapi.callAsync("VDI.snapshot", ref, {});
const kept = await seen("a snapshot", (object) => object.$ref === snapshot);
assert.equal(kept.snapshot_of, ref);
const second = randomBytes(8 * MIB);
const stream = Readable.from([second.subarray(0, 5), second.subarray(5)], { objectMode: false });
await xapi.putResource(stream, "/import_raw_vdi/", { query: { format: "raw", vdi: ref }, task: true });
assert.equal(sum(await exported(ref)), sum(second));
assert.equal(sum(await exported(snapshot)), sum(first));

// Errors have a code and parameters, and a task that fails is an error.
assert.deepEqual(await refused("HANDLE_INVALID", "VDI.get_record", "OpaqueRef:nothing"), ["VDI", "OpaqueRef:nothing"]);
await assert.rejects(xapi.callAsync("VDI.resize", ref, 1), (error) => error.code.length > 3);
await xapi.call("VDI.destroy", snapshot);
await xapi.call("VDI.destroy", ref);
const until = Date.now() + LIMIT_MS;
while (Object.values(xapi.objects.all).some((object) => object.$ref === ref)) {
  assert(Date.now() < until, "the end of a VDI is not seen by events");
  await new Promise((resolve) => setTimeout(resolve, 20));
}
await xapi.call("pool.remove_from_other_config", pool.$ref, "seen-by");
await xapi.disconnect();
console.log("done");
// It keeps connections open.
process.exit(0);
