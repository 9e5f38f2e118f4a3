import { mount } from 'svelte';

import App from './App.svelte';

/** show makes the page in an element. */
export function show(target: HTMLElement) {
  mount(App, { target });
}
