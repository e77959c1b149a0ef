// What the pages of a server share: requests with the server's key, and the form that asks for the key.
const $ = id => document.getElementById(id);
const plural = (count, name) => count + " " + name + (count === 1 ? "" : "s");

// Throws an Error with words for the user, and with `needsKey` if the server asks for its key.
async function ask(path, options) {
  const key = sessionStorage.getItem("tandemrt-key"), headers = {...(options || {}).headers};
  if (key) headers.authorization = "Bearer " + key;
  let answer;
  try {
    answer = await fetch(path, {cache: "no-store", ...options, headers});
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  }
  if (answer.status === 401) throw Object.assign(new Error("The server asks for its key."), {needsKey: true});
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Error(body && body.error ? body.error.message : `${path} answered with status ${answer.status}.`);
}

function setState(words, kind) {
  $("state").textContent = words;
  $("state").className = kind;
}

// Fills the form with the id `key`, and calls `then` when a key was entered.
function askForKey(then) {
  const secret = element("input", {id: "secret", type: "password", autocomplete: "off"});
  $("key").append(element("label", {}, "The server's key ", secret), " ", element("button", {}, "Show"));
  $("key").addEventListener("submit", event => {
    event.preventDefault();
    sessionStorage.setItem("tandemrt-key", secret.value);
    then();
  });
}

// Shows the names of the models in the list `model`, which is hidden while there is only one.
function showModels(names) {
  const chosen = $("model").value;
  if ([...$("model").options].map(option => option.value).join() === names.join()) return;
  $("model").replaceChildren(...names.map(name => element("option", {}, name)));
  if (names.includes(chosen)) $("model").value = chosen;
  $("models").hidden = names.length < 2;
}

// The link to /metrics needs the key as well, which a link cannot send.
document.querySelector("nav a[href=metrics]").addEventListener("click", async event => {
  if (!sessionStorage.getItem("tandemrt-key")) return;
  event.preventDefault();
  const text = await (await ask("metrics")).blob();
  open(URL.createObjectURL(new Blob([text], {type: "text/plain"})));
});
