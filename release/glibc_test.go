package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/blakesmith/ar"
	"github.com/ulikunitz/xz"
)

// parts are the files of a package of the C library that an image has.
var parts = []string{
	"./usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "./usr/lib/x86_64-linux-gnu/libc.so.6", "./usr/lib/x86_64-linux-gnu/libm.so.6",
	"./usr/lib/x86_64-linux-gnu/libdl.so.2", "./usr/lib/x86_64-linux-gnu/libpthread.so.0", "./usr/lib/x86_64-linux-gnu/librt.so.1",
	"./usr/share/doc/libc6/copyright",
}

// pack returns a package of Debian with files.
func pack(t *testing.T, files ...string) []byte {
	t.Helper()
	var data, deb bytes.Buffer
	plain, err := xz.NewWriter(&data)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(plain)
	for _, name := range files {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(name)), ModTime: time.Unix(1, 0)}))
		_, werr := io.WriteString(w, name)
		err = errors.Join(err, werr)
	}
	err = errors.Join(err, w.Close(), plain.Close())
	out := ar.NewWriter(&deb)
	err = errors.Join(err, out.WriteGlobalHeader())
	for _, member := range []struct {
		name string
		data []byte
	}{{"debian-binary", []byte("2.0\n")}, {"data.tar.xz", data.Bytes()}} {
		err = errors.Join(err, out.WriteHeader(&ar.Header{Name: member.name, Mode: 0o644, Size: int64(len(member.data))}))
		_, werr := out.Write(member.data)
		err = errors.Join(err, werr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return deb.Bytes()
}

// served starts an archive with one file, and returns its pool.
func served(t *testing.T, content []byte) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if content == nil || r.URL.Path != "/libc6.deb" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(content)
	}))
	t.Cleanup(s.Close)
	return s.URL + "/"
}

// archived returns a base for each processor, and the pools that have it: a first, which has
// dropped it, and a second.
func archived(t *testing.T, arches []string) (map[string]base, []string) {
	t.Helper()
	deb := pack(t, append([]string{"./usr/lib/x86_64-linux-gnu/libcrypt.so.1"}, parts...)...)
	all := map[string]base{}
	for _, arch := range arches {
		all[arch] = of(deb)
	}
	return all, []string{served(t, nil), served(t, deb)}
}

func of(deb []byte) base {
	sum := sha256.Sum256(deb)
	return base{"2.41-1", "libc6.deb", hex.EncodeToString(sum[:])}
}

// The layer has the files of the package that are wanted, their directories before them, and no
// others; its times are those of the commit.
func TestLayerOfLibraries(t *testing.T) {
	at := time.Date(2026, 11, 27, 0, 0, 0, 0, time.UTC)
	bases, pools := archived(t, []string{"amd64"})
	data, err := bases["amd64"].fetch(t.Context(), pools)
	if err != nil {
		t.Fatal(err)
	}
	layer, err := bases["amd64"].layer(data, at)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.Equal(at) {
			t.Errorf("%s is of %v", h.Name, h.ModTime)
		}
		if content, err := io.ReadAll(r); h.Typeflag == tar.TypeReg && (err != nil || string(content) != "./"+h.Name) {
			t.Errorf("%s has %q, %v", h.Name, content, err)
		}
		names = append(names, h.Name)
	}
	want := []string{"lib", "lib64", "usr/", "usr/lib/", "usr/lib/x86_64-linux-gnu/"}
	for _, name := range parts {
		if strings.HasSuffix(name, "/copyright") {
			want = append(want, "usr/share/", "usr/share/doc/", "usr/share/doc/libc6/")
		}
		want = append(want, strings.TrimPrefix(name, "./"))
	}
	if !slices.Equal(names, want) {
		t.Errorf("the layer has\n%q, want\n%q", names, want)
	}
}

// A package that an archive has changed, or that lacks a library, is refused.
func TestLibrariesRefused(t *testing.T) {
	whole, less := pack(t, parts...), pack(t, append(parts[:3:3], parts[4:]...)...)
	if _, err := of(whole).fetch(t.Context(), []string{served(t, less)}); err == nil || !strings.Contains(err.Error(), "its SHA-256 is") {
		t.Errorf("another package: %v", err)
	}
	if _, err := of(whole).fetch(t.Context(), []string{served(t, nil)}); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("no package: %v", err)
	}
	if _, err := of(less).layer(less, time.Now()); err == nil || !strings.Contains(err.Error(), "has no libdl.so.2") {
		t.Errorf("a package without a library: %v", err)
	}
}
