/* Questions to the server. The header X-Regard shows that the page asks, not another site. */

export class NotSignedIn extends Error {}

async function ask(method, path, body) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: { "X-Regard": "page", ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch {
    throw new Error("The server does not answer. Is `regard watch serve` still running?");
  }
  const found = await answer.json().catch(() => ({}));
  if (answer.status === 401) throw new NotSignedIn(found.error ?? "Not signed in.");
  if (!answer.ok) throw new Error(found.error ?? describe(found) ?? `The server answers ${answer.status}.`);
  return found;
}

/* What FastAPI says about a wrong field. */
const describe = (found) => Array.isArray(found.detail) ? found.detail.map((each) => `${each.loc.at(-1)}: ${each.msg}`).join("; ") : found.detail;

export const get = (path, parameters = {}) => {
  const query = new URLSearchParams();
  for (const [name, content] of Object.entries(parameters)) {
    if (content !== "" && content !== null && content !== undefined) query.append(name, content);
  }
  return ask("GET", query.size ? `${path}?${query}` : path);
};
export const post = (path, body = {}) => ask("POST", path, body);
export const remove = (path) => ask("DELETE", path);
