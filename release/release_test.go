package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// made makes all packages but the wheels, with this test as the programs, in a directory
// of its own.
func made(t *testing.T) *release {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	r := &release{
		root: "..", out: t.TempDir(), work: t.TempDir(), version: "0.1.0", commit: "0123456789ab",
		date: time.Date(2026, 11, 27, 0, 10, 0, 0, time.UTC), arches: []string{"amd64", "arm64"},
	}
	r.glibc, r.pools = archived(t, r.arches)
	for _, arch := range r.arches {
		if err := os.MkdirAll(r.bin(arch), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if err := os.WriteFile(filepath.Join(r.bin(arch), name), program, 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, step := range []func() error{
		func() error { return r.packages(t.Context()) }, func() error { return r.image(t.Context()) },
		func() error { return r.bill(t.Context()) }, func() error { return r.sums(io.Discard) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// Packages made at another time, in another directory, have the same bytes.
func TestMadeTwice(t *testing.T) {
	first := made(t)
	for start := time.Now(); time.Since(start) < 1100*time.Millisecond; { // times in packages are whole seconds
		<-time.After(100 * time.Millisecond)
	}
	second := made(t)
	want, err := first.made()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := second.made(); err != nil || !slices.Equal(got, want) {
		t.Fatalf("the second time there are %q, %v; the first time %q", got, err, want)
	}
	if kinds := 7; len(want) != kinds {
		t.Errorf("%d packages, want %d: %q", len(want), kinds, want)
	}
	for _, name := range want {
		a, err := os.ReadFile(filepath.Join(first.out, name))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(second.out, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s differs", name)
		}
		if bytes.Contains(a, []byte(first.work)) {
			t.Errorf("%s has the path of the directory in which it was made", name)
		}
	}
}

// The directory of the packages must be empty, and the processors known.
func TestRefused(t *testing.T) {
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "old.whl"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--out", full}, "old.whl"},
		{[]string{"--arch", "amd64,mips"}, "--arch amd64,mips"},
		{[]string{"more"}, `"more"`},
	} {
		if err := run(t.Context(), c.args, io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want an error with %s", c.args, err, c.want)
		}
	}
}

// Only packages that need no other one are made alone.
func TestOnly(t *testing.T) {
	for _, name := range []string{"bill", "programs", "images"} {
		err := run(t.Context(), []string{"--root", "..", "--out", t.TempDir(), "--only", name}, io.Discard)
		if err == nil || !strings.Contains(err.Error(), "--only "+name+": want wheels, packages or image") {
			t.Errorf("--only %s: %v", name, err)
		}
	}
}
