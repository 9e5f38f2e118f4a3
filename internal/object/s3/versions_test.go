package s3

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// kept lists the versions and markers below a prefix with a client of its own, in order: the keys,
// a marker with a dash before it.
func kept(t *testing.T, s *s3test.Server, prefix string) string {
	t.Helper()
	a := s.Do(t, "GET", "?versions&prefix="+url.QueryEscape(prefix), nil, nil)
	var list struct {
		Version, DeleteMarker []struct{ Key string }
	}
	if err := xml.Unmarshal(a.Body, &list); err != nil || a.Status != http.StatusOK {
		t.Fatalf("list versions: status %d, %v: %s", a.Status, err, a.Body)
	}
	var keys []string
	for _, v := range list.Version {
		keys = append(keys, strings.TrimPrefix(v.Key, prefix))
	}
	for _, v := range list.DeleteMarker {
		keys = append(keys, "-"+strings.TrimPrefix(v.Key, prefix))
	}
	slices.Sort(keys)
	return strings.Join(keys, " ")
}

// putAll makes small files.
func putAll(t *testing.T, b *Bucket, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := gathered(t, b, name, noise(100), object.Replace); err != nil {
			t.Fatal(err)
		}
	}
}

// sizes lists what takes space in a directory.
func sizes(t *testing.T, b *Bucket, dir string) string {
	t.Helper()
	entries, err := b.Stored(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		text := fmt.Sprintf("%s:%d", e.Name, e.Info.Size)
		if e.Info.Dir {
			text = e.Name + "/"
		}
		all = append(all, text)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// TestRemoveVersions removes files in a bucket that keeps versions, or did until now: none of
// theirs is left, and all those of other files are.
func TestRemoveVersions(t *testing.T) {
	for _, status := range []string{"Enabled", "Suspended"} {
		t.Run(status, func(t *testing.T) {
			s := s3test.Start(t, s3test.Options{Versioning: true})
			b := on(t, s, s.Endpoint, "p")
			putAll(t, b, "d/twice", "d/twice", "d/hidden", "d/hidden-not", "d/one", "d/other", "d/other", "e/x", "e/y", "e/y")
			if err := b.Hide(t.Context(), "d/hidden", "e/y"); err != nil {
				t.Fatal(err)
			}
			s.Versions(t, status)
			putAll(t, b, "d/twice", "d/late")
			if got, want := sizes(t, b, "d"), "hidden-not:100 hidden:100 late:100 one:100 other:200 twice:300"; got != want {
				t.Errorf("stored are %s, want %s", got, want)
			}
			if got := sizes(t, b, ""); got != "d/ e/" {
				t.Errorf("directories are %s", got)
			}
			if err := b.Remove(t.Context(), "e/x"); err != nil || sizes(t, b, "") != "d/ e/" {
				t.Errorf("after a file: %v, %s", err, sizes(t, b, "")) // the versions of the other are left
			}
			if err := b.Remove(t.Context(), "d/twice", "d/hidden", "d/late", "d/none", "e/y"); err != nil {
				t.Error(err)
			}
			if got := kept(t, s, "p/"); got != "d/hidden-not d/one d/other d/other" {
				t.Errorf("left are %s", got)
			}
			if err := b.Remove(t.Context(), "d/one"); err != nil || kept(t, s, "p/") != "d/hidden-not d/other d/other" {
				t.Errorf("after one: %v, %s", err, kept(t, s, "p/"))
			}
			if why, err := b.Unfreed(t.Context()); why != nil || err != nil {
				t.Errorf("unfreed: %v, %v", why, err)
			}
		})
	}
}

// TestRemoveManyVersions removes more versions than one request has.
func TestRemoveManyVersions(t *testing.T) {
	s := s3test.Start(t, s3test.Options{Versioning: true})
	b, p := behind(t, s, "p")
	var names []string
	for i := range page/2 + 5 {
		name := fmt.Sprintf("d/%04d", i)
		names = append(names, name, name)
	}
	putAll(t, b, names...)
	putAll(t, b, "d/other")
	if err := b.Remove(t.Context(), slices.Compact(names)...); err != nil {
		t.Fatal(err)
	}
	if got := kept(t, s, "p/"); got != "d/other" {
		t.Errorf("left are %.100s", got)
	}
	if n := p.Counts().Requests(faultproxy.DeleteMany); n != 2 {
		t.Errorf("%d removals", n)
	}
}

// TestRemoveWithoutPermission: the names go, the versions stay, and Unfreed has the reason.
func TestRemoveWithoutPermission(t *testing.T) {
	s := s3test.Start(t, s3test.Options{Versioning: true})
	for missing, match := range map[string]func(faultproxy.Request) bool{
		"s3:ListBucketVersions": func(r faultproxy.Request) bool { return r.Query.Has("versions") },
		"s3:DeleteObjectVersion": func(r faultproxy.Request) bool {
			return r.Class == faultproxy.DeleteMany || r.Class == faultproxy.Delete && r.Query.Has("versionId")
		},
	} {
		t.Run(missing, func(t *testing.T) {
			prefix := strings.TrimPrefix(missing, "s3:")
			b, p := behind(t, s, prefix)
			putAll(t, b, "d/a", "d/a", "d/b")
			p.Inject(faultproxy.Fault{Match: match, Do: faultproxy.Refuse(http.StatusForbidden, "AccessDenied")})
			for _, name := range []string{"d/a", "d/b"} {
				if err := b.Remove(t.Context(), name); err != nil {
					t.Error(err)
				}
			}
			if got := kept(t, s, prefix+"/"); got != "-d/a -d/b d/a d/a d/b" {
				t.Errorf("left are %s", got)
			}
			if why, err := b.Unfreed(t.Context()); err != nil || why == nil || !strings.Contains(why.Error(), missing) {
				t.Errorf("unfreed: %v, %v", why, err)
			}
			if got := sizes(t, b, "d"); got != "" {
				t.Errorf("stored are %s", got)
			}
			// With the permission, a later process removes them.
			later := on(t, s, s.Endpoint, prefix)
			if got := sizes(t, later, "d"); got != "a:200 b:100" {
				t.Errorf("stored are %s", got)
			}
			if err := later.Remove(t.Context(), "d/a", "d/b"); err != nil || kept(t, s, prefix+"/") != "" {
				t.Errorf("later: %v; left are %s", err, kept(t, s, prefix+"/"))
			}
		})
	}
}

// TestRemoveLocked removes locked files among others: those stay, and the others go.
func TestRemoveLocked(t *testing.T) {
	s := s3test.Start(t, s3test.Options{Lock: true})
	b := on(t, s, s.Endpoint, "p")
	putAll(t, b, "d/free", "d/held", "d/kept")
	s.Hold(t, "p/d/held", "ON")
	until := time.Now().Add(time.Hour).Truncate(time.Second).UTC()
	s.Lock(t, "p/d/kept", until)
	for _, remove := range []func() error{
		func() error { return b.Locked(t.Context(), "d/free", "d/held", "d/kept") },
		func() error { return b.Remove(t.Context(), "d/free", "d/held", "d/kept") },
		func() error { return b.Remove(t.Context(), "d/free", "d/held", "d/kept") },
	} {
		var locked *object.LockedError
		if err := remove(); !errors.As(err, &locked) || *locked != (object.LockedError{Versions: 2, Bytes: 200, Until: until, Hold: true}) {
			t.Errorf("%v: %+v", err, locked)
		}
	}
	if got := kept(t, s, "p/"); got != "d/held d/kept" {
		t.Errorf("left are %s", got)
	}
	if _, err := b.Get(t.Context(), "d/kept", 100); err != nil {
		t.Error(err)
	}
	if why, err := b.Unfreed(t.Context()); why != nil || err != nil {
		t.Errorf("unfreed: %v, %v", why, err)
	}
	s.Hold(t, "p/d/held", "OFF")
	if err := b.Remove(t.Context(), "d/held"); err != nil || kept(t, s, "p/") != "d/kept" {
		t.Errorf("after the hold: %v, left are %s", err, kept(t, s, "p/"))
	}
}

// TestRetention probes a bucket that locks what is put there, which a store can use: files are put
// and replaced, and stay when they are removed.
func TestRetention(t *testing.T) {
	s := s3test.Start(t, s3test.Options{Lock: true})
	s.Retain(t, 1)
	b := on(t, s, s.Endpoint, "p")
	found, err := b.Probe(t.Context())
	if err != nil || !found.Locked || !found.Versioned || !strings.Contains(strings.Join(found.Warnings, "\n"), "the bucket locks what is put there: 11 bytes of this probe stay, locked until ") {
		t.Errorf("%+v, %v", found, err)
	}
	if left, err := b.List(t.Context(), ""); err != nil || len(left) > 0 {
		t.Errorf("the probe leaves %v, %v", object.Names(left), err)
	}
	for name, size := range map[string]int{"small": 10, "empty": 0, "parts": smallest + 1} {
		for _, mode := range []object.Mode{object.Exclusive, object.Exclusive} {
			if err := gathered(t, b, name, noise(size), mode); err != nil && !errors.Is(err, fs.ErrExist) {
				t.Errorf("%s: %v", name, err)
			}
		}
		var locked *object.LockedError
		if err := b.Remove(t.Context(), name); !errors.As(err, &locked) || locked.Bytes != int64(size) || time.Until(locked.Until) > 25*time.Hour || time.Until(locked.Until) < 23*time.Hour {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestLockDecision has the answers of servers to the removal of a version that they refuse.
func TestLockDecision(t *testing.T) {
	const (
		retain = "X-Amz-Object-Lock-Retain-Until-Date"
		hold   = "X-Amz-Object-Lock-Legal-Hold"
		rule   = "<Rule><DefaultRetention><Mode>COMPLIANCE</Mode><Days>2</Days></DefaultRetention></Rule>"
	)
	now := time.Now().UTC().Truncate(time.Second)
	made := func(at time.Time) http.Header { return http.Header{"Last-Modified": {at.Format(http.TimeFormat)}} }
	for name, c := range map[string]struct {
		rule string
		head http.Header
		want string // empty: hidden
	}{
		"retention":             {"", http.Header{retain: {now.Add(time.Hour).Format(time.RFC3339)}}, "locked until " + now.Add(time.Hour).Format(time.RFC3339)},
		"legal hold":            {"", http.Header{hold: {"ON"}}, "locked by a legal hold of the bucket"},
		"both":                  {"", http.Header{hold: {"ON"}, retain: {now.Add(time.Hour).Format(time.RFC3339)}}, "locked until " + now.Add(time.Hour).Format(time.RFC3339) + ", and by a legal hold of the bucket"},
		"retention has ended":   {"", http.Header{retain: {now.Add(-time.Hour).Format(time.RFC3339)}}, ""},
		"rule that is not told": {rule, made(now), "locked until " + now.AddDate(0, 0, 2).Format(time.RFC3339)},
		"rule has ended":        {rule, made(now.AddDate(0, 0, -3)), ""},
		"no lock":               {"", http.Header{hold: {"OFF"}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			f.fault = func(kind string, _ int, _ *http.Request) *fault {
				switch kind {
				case "GET versioning":
					return &fault{status: 200, body: "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"}
				case "GET object-lock":
					return &fault{status: 200, body: "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled>" + c.rule + "</ObjectLockConfiguration>"}
				case "GET versions":
					return &fault{status: 200, body: "<ListVersionsResult><Version><Key>p/f</Key><VersionId>v1</VersionId><IsLatest>true</IsLatest><Size>7</Size></Version></ListVersionsResult>"}
				case "DELETE versionId":
					return &fault{status: 403, code: "AccessDenied"}
				case "HEAD versionId":
					header := http.Header{"Etag": {`"e"`}}
					for name, values := range c.head {
						header[name] = values
					}
					return &fault{status: 200, body: "1234567", header: header}
				}
				return nil
			}
			f.objects["p/f"] = stored{data: []byte("1234567")}
			b := f.bucket(t, Options{})
			err := b.Remove(t.Context(), "f")
			why, _ := b.Unfreed(t.Context())
			switch {
			case c.want == "" && (err != nil || why == nil || len(f.objects) > 0):
				t.Errorf("%v, unfreed because of %v", err, why)
			case c.want != "" && (err == nil || err.Error() != c.want || why != nil || len(f.objects) == 0):
				t.Errorf("%v, want %s; unfreed because of %v", err, c.want, why)
			}
		})
	}
}

// TestVersioningIsAskedOnce counts the requests in a bucket without versions.
func TestVersioningIsAskedOnce(t *testing.T) {
	f := newFake()
	b := f.bucket(t, Options{})
	f.fault = func(kind string, _ int, _ *http.Request) *fault {
		if kind == "GET versioning" {
			return &fault{status: 200, body: "<VersioningConfiguration></VersioningConfiguration>"}
		}
		return nil
	}
	for range 2 {
		if _, err := b.Stored(t.Context(), "d"); err != nil {
			t.Error(err)
		}
		if err := errors.Join(b.Remove(t.Context(), "a"), b.Remove(t.Context(), "a", "b"), b.Locked(t.Context(), "a")); err != nil {
			t.Error(err)
		}
		if _, err := b.Unfreed(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if got, want := f.requests(), []string{"GET versioning", "GET list-type", "DELETE", "POST delete", "GET list-type", "DELETE", "POST delete"}; !slices.Equal(got, want) {
		t.Errorf("requests are %q", got)
	}
}
