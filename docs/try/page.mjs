// The page: hands a file to the worker, shows what comes back. What a file says is shown as text, never as HTML.
const PATIENCE = 15_000; // milliseconds without a word, after which the page says so
const at = (id) => document.getElementById(id);
let worker, timer, file;

function say(text) {
  at("status").textContent = text;
}

// Start waiting for an answer again; `null` when there is nothing to wait for.
function wait(what) {
  clearTimeout(timer);
  if (what !== null) {
    say(`${what} ...`);
    timer = setTimeout(() => say(`${what} ... no answer for 15 seconds. Large files take longer; to give up, choose another file.`), PATIENCE);
  }
}

function start() {
  worker?.terminate(); // a run that is not over
  worker = new Worker("try/worker.mjs", { type: "module" });
  worker.onmessage = ({ data }) => answers[data.kind](data);
  worker.onerror = (event) => {
    wait(null);
    say(`The page could not start: ${event.message || "a part of it is missing"}.`);
  };
}

const answers = {
  doing: ({ what }) => wait(what),
  page: ({ title, text }) => {
    const heading = document.createElement("h2"), body = document.createElement("pre");
    heading.textContent = title;
    body.textContent = text;
    at("results").append(heading, body);
  },
  read: ({ opens, checked }) => {
    wait(null);
    say(opens ? "" : "This file cannot be opened as a checkpoint; the reason is below.");
    at("actions").hidden = !opens;
    at("check").hidden = checked;
  },
  made: ({ name, parts, command, text }) => {
    wait(null);
    say("");
    // bytes are new, a pair is a slice of the old file, which the browser copies only when it saves the result
    const blob = new Blob(parts.map((part) => (Array.isArray(part) ? file.slice(part[0], part[0] + part[1]) : part)));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = link.textContent = name;
    at("made").replaceChildren("Made ", link, `, ${blob.size.toLocaleString("en")} bytes.`);
    answers.page({ title: command, text });
    link.click();
  },
  refused: ({ text }) => {
    wait(null);
    say(text);
  },
};

function take(chosen) {
  if (!chosen) return;
  file = chosen;
  at("results").replaceChildren();
  at("made").replaceChildren();
  at("actions").hidden = true;
  start();
  wait("Starting Python");
  worker.postMessage({ kind: "read", file });
}

if (typeof WebAssembly !== "object") {
  say("This browser has no WebAssembly, which this page needs.");
  at("file").disabled = true;
} else {
  at("file").addEventListener("change", (event) => take(event.target.files[0]));
  for (const name of ["strip", "safetensors"]) {
    at(name).addEventListener("click", () => {
      at("made").replaceChildren();
      wait("Converting");
      worker.postMessage({ kind: "convert", to: name });
    });
  }
  at("check").addEventListener("click", () => worker.postMessage({ kind: "check" }));
  const drop = at("drop");
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files[0]);
    });
  }
}
