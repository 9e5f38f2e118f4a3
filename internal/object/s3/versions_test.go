package s3

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
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
	entries, err := b.ListAll(t.Context(), dir)
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
			// The next collection finds the versions, and adds no markers.
			b.Refresh()
			if got := sizes(t, b, "d"); got != "" {
				if err := b.Remove(t.Context(), "d/a", "d/b"); err != nil {
					t.Error(err)
				}
			}
			if got := kept(t, s, prefix+"/"); got != "-d/a -d/b d/a d/a d/b" {
				t.Errorf("then left are %s", got)
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
		retain  = "X-Amz-Object-Lock-Retain-Until-Date"
		hold    = "X-Amz-Object-Lock-Legal-Hold"
		refuses = "the server refuses the removal: remove version v1 of s3://bucket/p/f: AccessDenied: "
		rule    = "<Rule><DefaultRetention><Mode>COMPLIANCE</Mode><Days>2</Days></DefaultRetention></Rule>"
	)
	now := time.Now().UTC().Truncate(time.Second)
	made := func(at time.Time) http.Header { return http.Header{"Last-Modified": {at.Format(http.TimeFormat)}} }
	for name, c := range map[string]struct {
		rule string
		head http.Header
		want string // what the error begins with
	}{
		"retention":             {"", http.Header{retain: {now.Add(time.Hour).Format(time.RFC3339)}}, "locked until " + now.Add(time.Hour).Format(time.RFC3339)},
		"legal hold":            {"", http.Header{hold: {"ON"}}, "locked by a legal hold of the bucket"},
		"both":                  {"", http.Header{hold: {"ON"}, retain: {now.Add(time.Hour).Format(time.RFC3339)}}, "locked until " + now.Add(time.Hour).Format(time.RFC3339) + ", and by a legal hold of the bucket"},
		"retention has ended":   {"", http.Header{retain: {now.Add(-time.Hour).Format(time.RFC3339)}}, refuses},
		"rule that is not told": {rule, made(now), "locked until " + now.AddDate(0, 0, 2).Format(time.RFC3339)},
		"rule has ended":        {rule, made(now.AddDate(0, 0, -3)), refuses},
		"no lock":               {"", http.Header{hold: {"OFF"}}, refuses},
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
			if err == nil || !strings.HasPrefix(err.Error(), c.want) || why != nil || len(f.objects) == 0 {
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
		if _, err := b.ListAll(t.Context(), "d"); err != nil {
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

// TestRemoveUnhidesNothing removes a locked file that has no name any more: it gets none, however
// often it is removed, and nothing is left of it after its lock.
func TestRemoveUnhidesNothing(t *testing.T) {
	s := s3test.Start(t, s3test.Options{Lock: true})
	b := on(t, s, s.Endpoint, "p")
	putAll(t, b, "d/COMMIT.json", "d/x")
	s.Hold(t, "p/d/COMMIT.json", "ON")
	var locked *object.LockedError
	if err := b.Remove(t.Context(), "d/COMMIT.json"); !errors.As(err, &locked) {
		t.Fatal(err)
	}
	if err := b.Hide(t.Context(), "d/COMMIT.json"); err != nil {
		t.Fatal(err)
	}
	for _, names := range [][]string{{"d/COMMIT.json"}, {"d/COMMIT.json", "d/x"}, {"d/COMMIT.json"}} {
		if err := b.Remove(t.Context(), names...); !errors.As(err, &locked) || *locked != (object.LockedError{Versions: 1, Bytes: 100, Hold: true}) {
			t.Errorf("remove %q: %v", names, err)
		}
		if _, err := b.Get(t.Context(), "d/COMMIT.json", 100); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("after the removal of %q it is there: %v", names, err)
		}
	}
	if got := kept(t, s, "p/"); got != "-d/COMMIT.json d/COMMIT.json" {
		t.Errorf("left are %s", got)
	}
	s.Hold(t, "p/d/COMMIT.json", "OFF")
	if err := b.Remove(t.Context(), "d/COMMIT.json"); err != nil || kept(t, s, "p/") != "" {
		t.Errorf("after the hold: %v, left are %s", err, kept(t, s, "p/"))
	}
}

// TestRemoveRefused removes versions that the server refuses to remove for no reason that it tells.
// If it is one of several, that one is reported. If it is all of several files, no version can be
// removed, until the rights change.
func TestRemoveRefused(t *testing.T) {
	s := s3test.Start(t, s3test.Options{Lock: true})
	b, p := behind(t, s, "p")
	putAll(t, b, "d/a", "d/b", "d/c", "e/a", "e/b")
	p.Inject(faultproxy.Fault{ // of one request for several: each is tried
		Match: faultproxy.Of(faultproxy.DeleteMany), Do: faultproxy.Refuse(http.StatusForbidden, "AccessDenied"),
	})
	one := p.Inject(faultproxy.Fault{
		Match: func(r faultproxy.Request) bool {
			return r.Class == faultproxy.Delete && strings.HasSuffix(r.Key, "d/b")
		},
		Do: faultproxy.Refuse(http.StatusForbidden, "AccessDenied"),
	})
	for _, names := range [][]string{{"d/a", "d/b", "d/c"}, {"d/b"}} {
		var locked *object.LockedError
		if err := b.Remove(t.Context(), names...); !errors.As(err, &locked) || locked.Versions != 1 || locked.Bytes != 100 || locked.Refused == nil ||
			!strings.Contains(err.Error(), "the server refuses the removal: remove version ") || !strings.Contains(err.Error(), "s3:GetObjectRetention") {
			t.Errorf("remove %q: %v", names, err)
		}
	}
	if why, err := b.Unfreed(t.Context()); why != nil || err != nil {
		t.Errorf("unfreed: %v, %v", why, err)
	}
	if got := kept(t, s, "p/"); got != "d/b e/a e/b" {
		t.Errorf("left are %s", got)
	}
	one.Remove()
	all := p.Inject(faultproxy.Fault{Match: faultproxy.Of(faultproxy.Delete), Do: faultproxy.Refuse(http.StatusForbidden, "AccessDenied")})
	_ = b.Remove(t.Context(), "e/a", "e/b") // nor can their names be freed
	if why, err := b.Unfreed(t.Context()); why == nil || err != nil {
		t.Errorf("unfreed: %v, %v", why, err)
	}
	all.Remove()
	b.Refresh()
	if err := b.Remove(t.Context(), "d/b", "e/a", "e/b"); err != nil || kept(t, s, "p/") != "" {
		t.Errorf("with all rights: %v, left are %s", err, kept(t, s, "p/"))
	}
	if why, err := b.Unfreed(t.Context()); why != nil || err != nil {
		t.Errorf("unfreed: %v, %v", why, err)
	}
}

// TestVersioningIsAskedAgain has answers to the question for versions that are no answer for ever.
func TestVersioningIsAskedAgain(t *testing.T) {
	const enabled, never = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>", "<VersioningConfiguration></VersioningConfiguration>"
	for name, c := range map[string]struct {
		first fault
		stays bool
	}{
		"overloaded":    {fault{status: 503, code: "SlowDown"}, false},
		"failed":        {fault{status: 500, code: "InternalError"}, false},
		"expired":       {fault{status: 400, code: "ExpiredToken"}, false},
		"no connection": {fault{before: errReset}, false},
		"denied":        {fault{status: 403, code: "AccessDenied"}, true},
		"unknown":       {fault{status: 501, code: "NotImplemented"}, true},
		"not versioned": {fault{status: 200, body: never}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake()
				b := f.bucket(t, Options{})
				now := &c.first
				f.fault = func(string, int, *http.Request) *fault { return now }
				_, _ = b.Unfreed(t.Context())
				now = &fault{status: 200, body: enabled}
				if keeps, err := b.versioned(t.Context()); keeps == c.stays || err == nil == (c.stays && c.first.code != "") {
					t.Errorf("then: %t, %v", keeps, err)
				}
				b.Refresh()
				if keeps, err := b.versioned(t.Context()); !keeps || err != nil {
					t.Errorf("after Refresh: %t, %v", keeps, err)
				}
			})
		})
	}
}

// TestVersioningIsAwaited has several callers that wait for one answer, each as long as it may.
func TestVersioningIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		b := f.bucket(t, Options{})
		comes := make(chan struct{})
		f.fault = func(string, int, *http.Request) *fault {
			<-comes
			return &fault{status: 400, code: "RequestTimeout"}
		}
		var g sync.WaitGroup
		for range 3 {
			g.Go(func() {
				if _, err := b.Unfreed(t.Context()); err == nil {
					t.Error("no failure")
				}
			})
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		if _, err := b.Unfreed(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > time.Second {
			t.Errorf("%v, after %v", err, time.Since(began))
		}
		close(comes)
		g.Wait()
		if got := len(f.requests()); got != b.law.tries {
			t.Errorf("%d requests", got) // those of one caller
		}
	})
}

// TestVersionsContinue lists over failures between pages, also within the versions of one key.
func TestVersionsContinue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		b := f.bucket(t, Options{})
		type at struct{ key, id string }
		var all []at
		for i := range 2500 {
			all = append(all, at{fmt.Sprintf("p/d/%04d", i/2), fmt.Sprint(i)}, at{fmt.Sprintf("p/d/%04d", i/2), fmt.Sprint(i, "b")})
		}
		pages := 0
		f.fault = func(kind string, n int, r *http.Request) *fault {
			switch {
			case kind == "GET versioning":
				return &fault{status: 200, body: "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"}
			case n == 2 || n == 3 || n == 5:
				return &fault{before: errReset}
			}
			pages++
			key, id := r.URL.Query().Get("key-marker"), r.URL.Query().Get("version-id-marker")
			from := 0
			for i, v := range all {
				if v.key < key || v.key == key && id == "" || v == (at{key, id}) {
					from = i + 1
				}
			}
			var body strings.Builder
			body.WriteString("<ListVersionsResult>")
			to := min(from+999, len(all)) // a page ends within a key
			for _, v := range all[from:to] {
				fmt.Fprintf(&body, "<Version><Key>%s</Key><VersionId>%s</VersionId><Size>1</Size></Version>", v.key, v.id)
			}
			if to < len(all) {
				fmt.Fprintf(&body, "<IsTruncated>true</IsTruncated><NextKeyMarker>%s</NextKeyMarker><NextVersionIdMarker>%s</NextVersionIdMarker>", all[to-1].key, all[to-1].id)
			}
			body.WriteString("</ListVersionsResult>")
			return &fault{status: 200, body: body.String()}
		}
		entries, err := b.ListAll(t.Context(), "d")
		if err != nil || len(entries) != 1250 {
			t.Errorf("%d entries, %v", len(entries), err)
		}
		for _, e := range entries {
			if e.Info.Size != 4 {
				t.Errorf("%s has %d versions", e.Name, e.Info.Size)
			}
		}
		if pages != 6 { // without a failure 6
			t.Errorf("%d pages", pages)
		}
	})
}
