package page

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/ckptstore/ckptstore/events"
)

func ask(t *testing.T, method, path string, head map[string]string) *http.Response {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
	for k, v := range head {
		r.Header.Set(k, v)
	}
	w := httptest.NewRecorder()
	Handler().ServeHTTP(w, r)
	return w.Result()
}

func body(t *testing.T, r *http.Response) string {
	t.Helper()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The page and every file that it names are served: as a whole and compressed, under the policy.
func TestPage(t *testing.T) {
	index := ask(t, http.MethodGet, "/", nil)
	text := body(t, index)
	if index.StatusCode != http.StatusOK || index.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("the page: status %d, Cache-Control %q; want 200, no-store", index.StatusCode, index.Header.Get("Cache-Control"))
	}
	names := regexp.MustCompile(`(?:src|href)="\./([^"]+)"`).FindAllStringSubmatch(text, -1)
	if len(names) < 3 {
		t.Fatalf("the page names %d files, want a script, a style and an icon:\n%s", len(names), text)
	}
	for _, m := range names {
		plain := ask(t, http.MethodGet, "/"+m[1], nil)
		whole := body(t, plain)
		if plain.StatusCode != http.StatusOK || whole == "" || plain.Header.Get("Content-Security-Policy") != Policy {
			t.Errorf("%s: status %d, %d bytes, policy %q", m[1], plain.StatusCode, len(whole), plain.Header.Get("Content-Security-Policy"))
		}
		if strings.HasPrefix(m[1], "assets/") && !strings.Contains(plain.Header.Get("Cache-Control"), "immutable") {
			t.Errorf("%s: Cache-Control %q, want immutable: its name has its digest", m[1], plain.Header.Get("Cache-Control"))
		}
		short := ask(t, http.MethodGet, "/"+m[1], map[string]string{"Accept-Encoding": "br, gzip"})
		if short.Header.Get("Content-Encoding") != "gzip" {
			if len(whole) > 1000 {
				t.Errorf("%s: %d bytes are not compressed", m[1], len(whole))
			}
			continue
		}
		z, err := gzip.NewReader(short.Body)
		if err != nil {
			t.Fatal(err)
		}
		if unpacked, err := io.ReadAll(z); err != nil || string(unpacked) != whole {
			t.Errorf("%s: the compressed file differs: %v", m[1], err)
		}
		tag := short.Header.Get("ETag")
		if again := ask(t, http.MethodGet, "/"+m[1], map[string]string{"Accept-Encoding": "gzip", "If-None-Match": tag}); again.StatusCode != http.StatusNotModified {
			t.Errorf("%s with If-None-Match: status %d, want 304", m[1], again.StatusCode)
		}
	}
}

// The files name no other origin that a browser would ask, and nothing that the policy refuses.
func TestPageNamesNoOtherOrigin(t *testing.T) {
	all, err := files()
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range all {
		for _, refused := range []string{`src="http`, `href="http`, "url(http", "url(data:", "@import", "new Function(", "eval(", "<style", ` style="`} {
			if bytes.Contains(f.plain, []byte(refused)) {
				t.Errorf("%s contains %q", name, refused)
			}
		}
	}
	for _, part := range []string{"default-src 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} {
		if !strings.Contains(Policy, part) {
			t.Errorf("the policy lacks %s", part)
		}
	}
	if strings.Contains(Policy, "unsafe") {
		t.Errorf("the policy has an exception: %s", Policy)
	}
}

// The shell and the code are small enough for a slow line.
func TestPageIsSmall(t *testing.T) {
	const most = 90 << 10
	all, err := files()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, f := range all {
		if f.compressed != nil {
			sum += len(f.compressed)
		} else {
			sum += len(f.plain)
		}
	}
	t.Logf("%d files, %d bytes compressed", len(all), sum)
	if sum > most {
		t.Errorf("the page has %d bytes compressed, want at most %d", sum, most)
	}
}

func TestPageRefuses(t *testing.T) {
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{http.MethodPost, "/", http.StatusMethodNotAllowed},
		{http.MethodGet, "/assets/", http.StatusNotFound},
		{http.MethodGet, "/../page.go", http.StatusNotFound},
		{http.MethodGet, "/src/main.ts", http.StatusNotFound},
		{http.MethodGet, "/runs/bert", http.StatusNotFound},
	} {
		if got := ask(t, c.method, c.path, nil); got.StatusCode != c.status {
			t.Errorf("%s %s: status %d, want %d", c.method, c.path, got.StatusCode, c.status)
		}
	}
	head := ask(t, http.MethodHead, "/", nil)
	if head.StatusCode != http.StatusOK || body(t, head) != "" || head.Header.Get("Content-Length") == "0" {
		t.Errorf("HEAD /: status %d, Content-Length %s", head.StatusCode, head.Header.Get("Content-Length"))
	}
}

// A file that does not become smaller is served as it is.
func TestLoad(t *testing.T) {
	all, err := load(fstest.MapFS{"d/a.svg": {Data: []byte("<svg/>")}, "d/assets/b.js": {Data: bytes.Repeat([]byte("x"), 1000)}}, "d")
	if err != nil {
		t.Fatal(err)
	}
	if a := all["/a.svg"]; a.compressed != nil || a.forever || a.kind != "image/svg+xml" {
		t.Errorf("a.svg: %+v", a)
	}
	if b := all["/assets/b.js"]; b.compressed == nil || !b.forever {
		t.Errorf("b.js is not compressed or not immutable")
	}
}

// The screen of events offers every family of events as a selection.
func TestFamilies(t *testing.T) {
	source, err := os.ReadFile("src/screens/Events.svelte")
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`const families = \[(.*)\];`).FindSubmatch(source)
	if list == nil {
		t.Fatal("the screen has no list of families")
	}
	var offered []string
	for _, word := range regexp.MustCompile(`'(\w+)'`).FindAllSubmatch(list[1], -1) {
		offered = append(offered, string(word[1]))
	}
	_, err = events.ParsePattern("none.*") // the error lists the families
	if err == nil {
		t.Fatal("there is a family none")
	}
	_, text, _ := strings.Cut(err.Error(), "families are ")
	for _, family := range regexp.MustCompile(`\w+`).FindAllString(text, -1) {
		if !slices.Contains(offered, family) {
			t.Errorf("the screen offers %q, not %s", offered, family)
		}
	}
}
