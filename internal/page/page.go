// Package page is the page that shows a store in a browser. Its files are built from src by
// Vite (`task page`), committed in dist, and embedded, so that a build of the programs needs
// no Node. The page asks the HTTP API at api/v1/, relative to its own address.
//
//	Handler     serves the files at /
//	Policy      the Content-Security-Policy of every answer
package page

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/httpkit"
)

// Policy is the Content-Security-Policy of the page. Scripts, styles and requests are of the
// page's own origin only, no other page can frame it, and markup is only made from text by
// the policy of Svelte's templates, which are constants of the build.
const Policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types svelte-trusted-html"

//go:embed all:dist
var built embed.FS

// file is one file of the page.
type file struct {
	kind       string // media type
	plain      []byte
	compressed []byte // gzip; nil if it saves nothing
	tag        string // entity tag of plain
	forever    bool   // its name has a digest of its content
}

// files reads and compresses the files once, at the first request.
var files = sync.OnceValues(func() (map[string]file, error) { return load(built, "dist") })

func load(from fs.FS, root string) (map[string]file, error) {
	out := map[string]file{}
	err := fs.WalkDir(from, root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		plain, err := fs.ReadFile(from, name)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(plain)
		f := file{kind: kindOf(name), plain: plain, tag: hex.EncodeToString(sum[:8])}
		below := strings.TrimPrefix(name, root+"/")
		f.forever = strings.HasPrefix(below, "assets/")
		if f.compressed, err = compress(plain); err != nil {
			return err
		}
		out["/"+below] = f
		return nil
	})
	return out, err
}

// kindOf returns the media type of a file. It does not depend on the tables of the system.
func kindOf(name string) string {
	switch path.Ext(name) {
	case ".html":
		return "text/html; charset=utf-8"
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	case ".txt":
		return "text/plain; charset=utf-8"
	}
	if kind := mime.TypeByExtension(path.Ext(name)); kind != "" {
		return kind
	}
	return "application/octet-stream"
}

func compress(plain []byte) ([]byte, error) {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(plain); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	if b.Len() >= len(plain) {
		return nil, nil
	}
	return b.Bytes(), nil
}

// Handler serves the page. It answers GET and HEAD of files that exist, and / by the page
// itself, which needs no token: it holds nothing of the store. Its requests do.
func Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", Policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "the page is only read: use GET", http.StatusMethodNotAllowed)
			return
		}
		all, err := files()
		if err != nil {
			http.Error(w, "the page of this program is damaged; the API at /api/v1/ is not", http.StatusInternalServerError)
			return
		}
		name := r.URL.Path
		if name == "/" || name == "" {
			name = "/index.html"
		}
		f, found := all[name]
		if !found {
			http.Error(w, "no such file: the page is at /", http.StatusNotFound)
			return
		}
		f.serve(w, r)
	})
}

func (f file) serve(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", f.kind)
	h.Set("Vary", "Accept-Encoding")
	h.Set("Cache-Control", "no-store")
	if f.forever {
		h.Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	body, tag := f.plain, f.tag
	if f.compressed != nil && httpkit.TakesGzip(r.Header.Get("Accept-Encoding")) {
		h.Set("Content-Encoding", "gzip")
		body, tag = f.compressed, tag+"-gz"
	}
	h.Set("ETag", strconv.Quote(tag))
	if r.Header.Get("If-None-Match") == strconv.Quote(tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(body) // the client is gone: no place to report it
	}
}
