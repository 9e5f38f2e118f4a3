import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

// Addresses are relative, so that the page works below any prefix of a proxy. Nothing is
// inlined: the page's policy has no data: URLs.
export default defineConfig({
  base: './',
  plugins: [
    svelte({
      compilerOptions: {
        runes: true,
        // A table that becomes cards on a phone needs its roles: browsers derive them from how it is displayed.
        warningFilter: (w) => w.code !== 'a11y_no_redundant_roles',
      },
    }),
  ],
  build: {
    outDir: 'dist',
    assetsDir: 'assets',
    assetsInlineLimit: 0,
    target: 'es2023',
    modulePreload: { polyfill: false },
    cssCodeSplit: false,
    reportCompressedSize: false,
  },
});
