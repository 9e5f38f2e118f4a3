// The theme: that of the system, or the one chosen on the page.

export type Choice = 'system' | 'light' | 'dark';

const key = 'ckptstore.theme';
const dark = matchMedia('(prefers-color-scheme: dark)');

function stored(): Choice {
  try {
    const v = localStorage.getItem(key);
    return v === 'light' || v === 'dark' ? v : 'system';
  } catch {
    return 'system';
  }
}

let choice = $state<Choice>(stored());
let system = $state(dark.matches);

dark.addEventListener('change', () => {
  system = dark.matches;
});

export const theme = {
  get choice() {
    return choice;
  },
  /** shown is the theme that the page has: a chart draws itself again when it changes. */
  get shown(): 'light' | 'dark' {
    return choice === 'system' ? (system ? 'dark' : 'light') : choice;
  },
  /** next chooses the other theme than the one shown, and then that of the system again. */
  next() {
    const order: Choice[] = ['system', 'light', 'dark'];
    choice = order[(order.indexOf(choice) + 1) % 3];
    try {
      localStorage.setItem(key, choice);
    } catch {
      // Without storage the choice ends with the page.
    }
  },
};
