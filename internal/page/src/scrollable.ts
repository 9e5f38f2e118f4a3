// scrollable lets the keyboard scroll an element, while its content is larger than it is.
export function scrollable(e: HTMLElement): () => void {
  const look = () => {
    if (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight) e.tabIndex = 0;
    else e.removeAttribute('tabindex');
  };
  const watch = new ResizeObserver(look);
  const changes = new MutationObserver(look);
  watch.observe(e);
  changes.observe(e, { childList: true, subtree: true });
  look();
  return () => {
    watch.disconnect();
    changes.disconnect();
  };
}
