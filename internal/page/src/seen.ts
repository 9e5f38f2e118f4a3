// seen calls a function when an element comes into view for the first time: cells ask then.

const waits = new Map<Element, () => void>();

const watch = new IntersectionObserver((all) => {
  for (const e of all) {
    if (!e.isIntersecting) continue;
    watch.unobserve(e.target);
    waits.get(e.target)?.();
    waits.delete(e.target);
  }
});

export function seen(then: () => void): (e: HTMLElement) => () => void {
  return (e) => {
    waits.set(e, then);
    watch.observe(e);
    return () => {
      waits.delete(e);
      watch.unobserve(e);
    };
  };
}
