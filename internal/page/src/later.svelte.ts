// later is false until the browser has drawn what a component shows first: a sentence need not
// wait for the tables below it.

export class Later {
  come = $state(false);

  /** ready tells when the first part is there. It must be called while a component is created. */
  constructor(ready: () => boolean) {
    $effect(() => {
      if (this.come || !ready()) return;
      let timer: ReturnType<typeof setTimeout> | undefined;
      const draw = () => (timer ??= setTimeout(() => (this.come = true)));
      const frame = requestAnimationFrame(draw);
      const hidden = setTimeout(draw, 250); // a tab in the background draws no frames
      return () => {
        cancelAnimationFrame(frame);
        clearTimeout(hidden);
        clearTimeout(timer);
      };
    });
  }
}
