// Calls by JSON-RPC. The session lives in this tab alone: never in an address, never in a cookie.

const KEY = "tapio-session";
let session = sessionStorage.getItem(KEY);
let next = 1;
let onEnd = () => {};

/** An error of XenAPI: its code and its parameters. */
export class ApiError extends Error {
  constructor(code, params) {
    super([code, ...params].join(" "));
    this.code = code;
    this.params = params;
  }
}

async function post(method, params, signal) {
  let reply;
  try {
    reply = await fetch("/jsonrpc", {
      method: "POST", signal, credentials: "omit", headers: { "content-type": "application/json" },
      body: JSON.stringify({ jsonrpc: "2.0", id: next++, method, params }),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("CONNECTION_LOST", [location.host]);
  }
  if (!reply.ok) throw new ApiError("HTTP_FAILURE", [`${reply.status} ${reply.statusText}`]);
  const answer = await reply.json();
  if (!answer.error) return answer.result;
  const error = new ApiError(answer.error.message, answer.error.data ?? []);
  if (error.code === "SESSION_INVALID" && session) {
    forget();
    onEnd(error);
  }
  throw error;
}

function forget() {
  session = null;
  sessionStorage.removeItem(KEY);
}

export const hasSession = () => session !== null;
export const whenSessionEnds = (action) => { onEnd = action; };

/** A call in the session. */
export const call = (method, ...params) => post(method, [session, ...params]);

/** The same, which `signal` ends. */
export const callUntil = (signal, method, ...params) => post(method, [session, ...params], signal);

export async function login(name, password) {
  session = await post("session.login_with_password", [name, password, "1.0", "Tapio dashboard"]);
  sessionStorage.setItem(KEY, session);
}

export async function logout() {
  const ended = session;
  forget();
  await post("session.logout", [ended]).catch(() => {});
}

/** A ticket that opens a console once; a connection names it instead of the session. */
export async function consoleTicket(uuid) {
  const body = new URLSearchParams({ session_id: session, uuid });
  let reply;
  try {
    reply = await fetch("/console/ticket", { method: "POST", credentials: "omit", body });
  } catch {
    throw new ApiError("CONNECTION_LOST", [location.host]);
  }
  const answer = await reply.json().catch(() => { throw new ApiError("HTTP_FAILURE", [`${reply.status} ${reply.statusText}`]); });
  if (answer.error) throw new ApiError(answer.error[0], answer.error.slice(1));
  return answer.result;
}

/** Account and role of the session. */
export async function whoAmI() {
  const [name, roles] = await Promise.all([
    call("session.get_auth_user_name", session), call("session.get_rbac_permissions", session)]);
  return { name: name || "root", role: roles[0] ?? "" };
}

/** Names of all messages there are, to find out what this daemon can do. */
export const methods = async () => new Set(await post("system.listMethods", []));
