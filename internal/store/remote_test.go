package store

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/query"
)

// server starts a NATS server in another process.
func server(t *testing.T) (url string, p *process) {
	t.Helper()
	return serverIn(t, filepath.Join(t.TempDir(), "log"))
}

// serverIn is server with its streams in dir.
func serverIn(t *testing.T, dir string) (url string, p *process) {
	t.Helper()
	p = start(t, "server", "CKPTSTORE_TEST_DIR="+dir)
	return p.hear("start").Text, p
}

func TestURL(t *testing.T) {
	t.Parallel()
	url, srv := server(t)
	data := filepath.Join(t.TempDir(), "shared")
	refused(t, Options{Location: url}, ErrNoStore, url, "ckptstore init", "--data")
	for _, bad := range []string{"", "relative/data"} {
		_, err := Init(t.Context(), url, bad)
		wrong(t, err, nil, "--data", "absolute")
	}

	p := start(t, "actor")
	id := p.do(request{Do: "init", Location: url, Data: data}).Text
	_, err := Init(t.Context(), url, data)
	wrong(t, err, ErrExists, id, data)

	p.do(request{Do: "open", Location: url})
	s := open(t, url)
	if s.ID != id || s.Data.Dir() != filepath.Join(data, "data") || s.Owns() {
		t.Errorf("opened %s with data in %s, owned: %v", s.ID, s.Data.Dir(), s.Owns())
	}
	path := committed(t, s, "run", 1)
	if !strings.HasPrefix(path, data) {
		t.Errorf("data is in %s", path)
	}
	p.do(request{Do: "append", Run: "run", Name: "fact", Count: 5})
	p.do(request{Do: "begin", Run: "run", Name: "step-2"})
	for _, q := range []string{query.Checkpoints.Name, query.Metrics.Name, query.Digest.Name} {
		mine, err := s.Views().Answer(t.Context(), q, query.Params{Run: "run", Trial: trialName, Attempt: 1, All: true})
		if err != nil {
			t.Fatal(err)
		}
		if theirs := p.do(request{Do: "ask", Name: q, Run: "run"}); string(theirs.Data) != string(mine) {
			t.Errorf("%s: here %s, there %s", q, mine, theirs.Data)
		}
	}
	blob, err := s.Blobs.Put(t.Context(), noise(1<<20))
	if err != nil || !strings.HasPrefix(s.Blobs.Path(blob.Digest), data) {
		t.Errorf("blob in %s, %v", s.Blobs.Path(blob.Digest), err)
	}
	onceEach(t, s, p.acknowledged())

	p.do(request{Do: "hold", Run: "run", Name: "job-1"})
	_, _, err = s.HoldRun(t.Context(), "run", "job-2")
	wrong(t, err, nil, "job-1")
	p.do(request{Do: "release"})

	// The data location is not mounted on this machine.
	if err := os.Rename(data, data+".away"); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	refused(t, Options{Location: url}, os.ErrNotExist, data, "mount")
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
	if _, err := os.Stat(data); err == nil {
		t.Error("the probe made the data location")
	}
	if err := os.Rename(data+".away", data); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		shut(t, s)
	}
	p.end()
	left, err := os.ReadDir(data)
	if err != nil || !slices.Equal(names(left), []string{"blobs", "data", markName}) {
		t.Errorf("in the data location: %v, %v", names(left), err)
	}
	srv.end()
}

func names(entries []os.DirEntry) (names []string) {
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestNobody opens URLs without a server, or with something other than a NATS server.
func TestNobody(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	url := "nats://user:secret@" + address
	begin := time.Now()
	_, err = Init(t.Context(), url, t.TempDir())
	for _, err := range []error{err, openError(t, url)} {
		wrong(t, err, nil, address, "check that a NATS server", "nats-server")
		wrong(t, err, ErrNoStore)
		if err != nil && (strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "ckptstore serve")) {
			t.Errorf("error %v contains the password", err)
		}
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
}

func openError(t *testing.T, location string) error {
	t.Helper()
	s, err := Open(t.Context(), Options{Location: location})
	if err == nil {
		shut(t, s)
	}
	return err
}

func TestLocation(t *testing.T) {
	for given, want := range map[string]string{
		"nats://h":                     "nats://h",
		"NATS://Me:Secret@H:1":         "nats://Me:Secret@H:1",
		"Tls://h:1, nats://i,NATS://j": "tls://h:1,nats://i,nats://j",
		"nats://h:1,i:2":               "nats://h:1,i:2",
		"ckpts":                        "",
		"./nats":                       "",
		"nats":                         "",
		"/a://b":                       "",
		"./s3://b":                     "",
		"a,b":                          "",
		"2026:07":                      "",
	} {
		got, isURL, err := parseLocation(given)
		if want == "" {
			want = given
		}
		if err != nil || got != want || isURL != strings.Contains(want, "://") && want[0] != '/' && want[0] != '.' || IsURL(given) != isURL {
			t.Errorf("%s is %s, a URL: %v, %v", given, got, isURL, err)
		}
	}
	// A bucket is no place of a log, and can be read without one.
	if _, _, err := parseLocation("s3://bucket"); !errors.Is(err, ErrLocation) || !strings.Contains(err.Error(), "--offline") {
		t.Errorf("a bucket: %v", err)
	}
	if _, err := Init(t.Context(), "s3://bucket", ""); !errors.Is(err, ErrLocation) {
		t.Errorf("a store in a bucket: %v", err)
	}
	for _, bad := range []string{"s4://bucket", "http://h", "nats:/h", "NATS:/h", "gs:/b", "nats://h,http://i", "s3+x://token@b", "://h"} {
		if _, _, err := parseLocation(bad); !errors.Is(err, ErrLocation) || !strings.Contains(err.Error(), "nats://") || strings.Contains(err.Error(), "token") {
			t.Errorf("%s: %v", bad, err)
		}
		dir := t.TempDir()
		t.Run(bad, func(t *testing.T) {
			t.Chdir(dir)
			_, err := Init(t.Context(), bad, "")
			_, data := OpenData(bad)
			for _, err := range []error{err, data, openError(t, bad), Ensure(t.Context(), bad, time.Second, slog.New(slog.DiscardHandler))} {
				wrong(t, err, ErrLocation, "nats://")
			}
			if left, err := os.ReadDir("."); err != nil || len(left) > 0 {
				t.Errorf("made %v, %v", left, err)
			}
		})
	}
}
