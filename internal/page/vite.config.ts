import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig, type Plugin } from 'vite';

/** preload names the code of the screens in the page, so that the browser reads it in parallel with the entry. */
const preload: Plugin = {
  name: 'preload',
  transformIndexHtml: {
    order: 'post',
    handler: (_html, { bundle }) =>
      Object.values(bundle ?? {})
        .filter((c) => c.type === 'chunk' && c.name === 'app')
        .map((c) => ({ tag: 'link', attrs: { rel: 'modulepreload', crossorigin: true, href: './' + c.fileName }, injectTo: 'head' as const })),
  },
};

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
    preload,
  ],
  build: {
    outDir: 'dist',
    assetsDir: 'assets',
    assetsInlineLimit: 0,
    target: 'es2023',
    modulePreload: false, // what is needed is in the page
    cssCodeSplit: false,
    reportCompressedSize: false,
  },
});
