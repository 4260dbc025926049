// Python in a worker: ckpt.pyz, unchanged, over a file that is read by slices.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const python = (async () => {
  const py = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  for (const name of ["ckpt.pyz", "in_page.py"]) {
    const answer = await fetch(new URL(`./${name}`, import.meta.url));
    if (!answer.ok) throw new Error(`${name} is missing`);
    py.FS.writeFile(`/home/pyodide/${name}`, new Uint8Array(await answer.arrayBuffer()));
  }
  py.runPython("import sys; sys.path[:0] = ['/home/pyodide/ckpt.pyz', '/home/pyodide']");
  return { py, page: py.pyimport("in_page") };
})();

const CHECKED = 1 << 30; // up to this size every byte is checked unasked
let file;

self.onmessage = async ({ data }) => {
  try {
    const { py, page } = await python;
    if (data.kind === "read") {
      file = data.file;
      py.FS.mkdir("/in");
      py.FS.mount(py.FS.filesystems.WORKERFS, { files: [file] }, "/in");
      show(page, file.size <= CHECKED ? ["inspect", "scan", "check"] : ["inspect", "scan"]);
    } else if (data.kind === "check") {
      show(page, ["check"]);
    } else {
      const made = page.convert(data.to).toJs({ dict_converter: Object.fromEntries });
      self.postMessage({ kind: made.parts ? "made" : "refused", ...made });
    }
  } catch (error) {
    self.postMessage({ kind: "refused", text: `This went wrong: ${error.message}` });
  }
};

function show(page, commands) {
  for (const command of commands) {
    self.postMessage({ kind: "doing", what: `ckpt ${command}` });
    self.postMessage({ kind: "page", title: `ckpt ${command} ${file.name}`, text: page.run(command, file.name) });
  }
  self.postMessage({ kind: "read", opens: page.opens(file.name), checked: commands.includes("check") });
}
