// The keyboard: / j k g r|t|h [ ] . ?, and Enter, which follows the focused link by itself.
//
//	data-filter        the field that / leads to
//	data-row           a link in a table or list: j and k go from one to the next
//	data-previous, data-next, data-now    links that [ ] and . follow

import { go, link } from './route.svelte';

let awaits = 0; // until when a letter belongs to g

/** listen handles keys that no field takes. help opens the list of keys. */
export function listen(help: () => void): () => void {
  const press = (e: KeyboardEvent) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.defaultPrevented) return;
    const target = e.target as HTMLElement;
    if (target.closest('input, textarea, select, dialog[open]')) {
      if (e.key === 'Escape' && target.matches('[data-filter]')) target.blur();
      return;
    }
    if (awaits > Date.now()) {
      awaits = 0;
      const to = { r: link([]), t: link(['events']), h: link(['health']) }[e.key];
      if (to) {
        e.preventDefault();
        go(to);
        return;
      }
    }
    switch (e.key) {
      case 'g':
        awaits = Date.now() + 1500;
        return;
      case '?':
        e.preventDefault();
        help();
        return;
      case '/': {
        const field = document.querySelector<HTMLInputElement>('[data-filter]');
        if (!field) return;
        e.preventDefault();
        field.focus();
        field.select();
        return;
      }
      case 'j':
        return step(1);
      case 'k':
        return step(-1);
      case '[':
        return follow('[data-previous]');
      case ']':
        return follow('[data-next]');
      case '.':
        return follow('[data-now]');
    }
  };
  addEventListener('keydown', press);
  return () => removeEventListener('keydown', press);
}

function step(by: number) {
  const rows = [...document.querySelectorAll<HTMLElement>('[data-row]')].filter((r) => r.offsetParent !== null);
  if (rows.length === 0) return;
  const at = rows.indexOf(document.activeElement as HTMLElement);
  const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
  rows[next].focus();
}

function follow(selector: string) {
  document.querySelector<HTMLElement>(selector)?.click();
}
