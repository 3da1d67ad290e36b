// From files a browser starts no worker, and the search is one: there it runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = Object.assign(document.createElement("iframe"), { hidden: true })
      document.body.append(frame)
      const inside = frame.contentWindow
      const dispatch = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      inside.document.open()
      inside.told = data => setTimeout(dispatch, 0, data)
      inside.document.write(`<script>
        postMessage = data => told(data)
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((loaded, failed) =>
          document.body.append(Object.assign(document.createElement("script"), { src: url, onload: loaded, onerror: failed })))),
          Promise.resolve())
      </script>`)
      this.ready = new Promise(loaded => {
        const script = Object.assign(inside.document.createElement("script"), { src: url, onload: loaded })
        ;(inside.document.body ?? inside.document.documentElement).append(script)
      })
      inside.document.close()
      this.inside = inside
    }
    postMessage(data) {
      this.ready = this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
