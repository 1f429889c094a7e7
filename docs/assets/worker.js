// The search runs in a worker. Browsers allow none to pages that are opened from a folder: there,
// this class runs the worker's script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          script.src = new URL(source, document.baseURI);
          script.onload = done;
          script.onerror = failed;
          inner.document.body.append(script);
        });
      inner.importScripts = (...sources) => sources.reduce((last, s) => last.then(() => load(s)), Promise.resolve());
      this.inner = inner;
      this.ready = load(url);
      this.terminate = () => frame.remove();
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
