package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// once is the start of a file of tests: once reports whether it is called for the first time with a name.
const once = `package p

import (
	"os"
	"testing"
	"time"
)

func once(name string) bool {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		f.Close()
	}
	log, _ := os.OpenFile("ran", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	log.WriteString(name + " ")
	log.Close()
	return err == nil
}

var _ = time.Second

`

// TestRetry: the second try runs the tests that failed, that did not end and that never began, and no other. It
// decides the exit code.
func TestRetry(t *testing.T) {
	for name, c := range map[string]struct {
		tests   string
		args    string
		code    int
		ran     string // by both tries
		printed []string
		record  string
	}{
		"passes": {
			tests: `
func TestA(t *testing.T) { once("A") }
func TestB(t *testing.T) { t.Run("sub", func(t *testing.T) { if once("B") { t.Error("cause of B") } }) }
func TestBB(t *testing.T) { once("BB") }
func TestC(t *testing.T) { if once("C") { t.Error("cause of C") } }`,
			ran:     "A B BB C B C",
			printed: []string{"cause of B", "cause of C", "FAIL\texample.com/m/p", "== FAILED at first: example.com/m/p TestB TestC\n", "ok  \texample.com/m/p"},
			record:  "pass TestA|pass TestBB|pass TestB/sub|pass TestB|pass TestC|unsteady TestB|unsteady TestC",
		},
		"fails again": {
			tests: `
func TestA(t *testing.T) { if once("A") { t.Error("cause of A") } }
func TestB(t *testing.T) { once("B"); t.Error("cause of B") }`,
			code:    1,
			ran:     "A B A B",
			printed: []string{"cause of A", "== FAILED at first: example.com/m/p TestA TestB\n", "cause of B"},
			record:  "pass TestA|unsteady TestA",
		},
		"skipped then": {
			tests: `
func TestA(t *testing.T) { if once("A") { t.Error("cause of A") }; t.Skip("no disk") }`,
			code:    1,
			ran:     "A A",
			printed: []string{"== FAILED: example.com/m/p: TestA failed at first, and was skipped or not found at the second try\n"},
			record:  "skip TestA p_test.go:22: no disk",
		},
		"missing then": {
			tests: `
func TestA(t *testing.T) { once("A"); os.WriteFile("p_test.go", []byte("package p"), 0o600); t.Error("cause of A") }`,
			code:    1,
			ran:     "A",
			printed: []string{"== FAILED: example.com/m/p: TestA failed at first, and was skipped or not found at the second try\n"},
		},
		"panic": {
			tests: `
func TestA(t *testing.T) { once("A") }
func TestB(t *testing.T) { if once("B") { panic("cause of B") } }
func TestC(t *testing.T) { once("C") }`,
			ran:     "A B B C",
			printed: []string{"cause of B", "== FAILED at first: example.com/m/p TestB\n", "ok  \texample.com/m/p"},
			record:  "pass TestA|pass TestB|pass TestC|unsteady TestB",
		},
		"failure after a panic": {
			tests: `
func TestA(t *testing.T) { if once("A") { panic("cause of A") } }
func TestB(t *testing.T) { once("B"); t.Error("cause of B") }`,
			code:    1,
			ran:     "A A B",
			printed: []string{"cause of A", "== FAILED at first: example.com/m/p TestA\n", "cause of B"},
			record:  "pass TestA|unsteady TestA",
		},
		"timeout": {
			args: "-timeout 3s",
			tests: `
func TestA(t *testing.T) { once("A") }
func TestB(t *testing.T) { if once("B") { time.Sleep(time.Minute) } }
func TestC(t *testing.T) { once("C") }`,
			ran:     "A B B C",
			printed: []string{"panic: test timed out", "== FAILED at first: example.com/m/p TestB\n"},
			record:  "pass TestA|pass TestB|pass TestC|unsteady TestB",
		},
		"no test failed": {
			tests: `
func TestA(t *testing.T) { once("A") }
func TestMain(m *testing.M) { m.Run(); if once("main") { os.Exit(3) } }`,
			ran:     "A main A main",
			printed: []string{"== FAILED at first: example.com/m/p\n"},
			record:  "pass TestA|pass TestA|unsteady ",
		},
		"build": {
			tests: `
func TestA(t *testing.T) { undefined() }`,
			code:    1,
			printed: []string{"undefined: undefined", "[build failed]", "== FAILED at first: example.com/m/p\n"},
		},
		"data race": {
			tests: `
func TestA(t *testing.T) { if once("A") { t.Error("cause of A") } }
func TestB(t *testing.T) { if once("B") { os.Stdout.WriteString("WARNING: DATA RACE\n"); t.Error("race detected during execution of test") } }`,
			code:    1,
			ran:     "A B",
			printed: []string{"cause of A", "WARNING: DATA RACE", "== FAILED: example.com/m/p: no second try after a data race\n"},
		},
		"several times": {
			args: "-count 2",
			tests: `
func TestA(t *testing.T) { if once("A") { t.Error("cause of A") } }`,
			ran:     "A A A A",
			printed: []string{"cause of A", "== FAILED at first: example.com/m/p TestA\n"},
			record:  "pass TestA|pass TestA|pass TestA|unsteady TestA",
		},
		"only a pattern": {
			args: "-run TestB|TestC",
			tests: `
func TestA(t *testing.T) { once("A") }
func TestB(t *testing.T) { once("B") }
func TestC(t *testing.T) { if once("C") { t.Error("cause of C") } }`,
			ran:     "B C C",
			printed: []string{"== FAILED at first: example.com/m/p TestC\n"},
			record:  "pass TestB|pass TestC|unsteady TestC",
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{"p/p_test.go": once + strings.TrimPrefix(c.tests, "\n") + "\n"}
			if name == "passes" {
				files["other/a_test.go"] = "package other\n\nimport \"testing\"\n\nfunc TestC(t *testing.T) {}\n"
			}
			dir := module(t, files)
			record := filepath.Join(dir, "record")
			args := append([]string{"--record", record, "--retry", "-count=1", "./..."}, strings.Fields(c.args)...)
			var stdout, stderr bytes.Buffer
			code, err := run(t.Context(), args, &stdout, &stderr)
			if code != c.code || err != nil {
				t.Errorf("code %d, %v", code, err)
			}
			rest := stdout.String()
			for _, want := range c.printed {
				_, after, found := strings.Cut(rest, want)
				if !found {
					t.Errorf("%q is not printed, or not in this order", want)
					continue
				}
				rest = after
			}
			ran, _ := os.ReadFile(filepath.Join(dir, "p", "ran"))
			if got := strings.TrimSpace(string(ran)); got != c.ran {
				t.Errorf("ran %q, want %q", got, c.ran)
			}
			lines, err := os.ReadFile(record)
			if err != nil {
				t.Fatal(err)
			}
			var recorded []string
			for line := range strings.Lines(string(lines)) {
				parts := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
				if parts[1] == "example.com/m/p" {
					recorded = append(recorded, strings.Join(slices.Delete(parts, 1, 2), " "))
				}
			}
			if got := strings.Join(recorded, "|"); got != c.record {
				t.Errorf("recorded %q, want %q", got, c.record)
			}
			if t.Failed() {
				t.Logf("%s%s", stdout.String(), stderr.String())
			}
		})
	}
}

// TestNoRetry: a run that did not report on all packages stays failed.
func TestNoRetry(t *testing.T) {
	p := &tests{name: "p", failed: true, whole: true}
	for name, f := range map[string]*filter{
		"a package did not end":    {running: map[string]*tests{"q": {}}, over: []*tests{p}},
		"no package has failed":    {over: []*tests{{name: "p"}}},
		"a race in one of several": {over: []*tests{p, {name: "q", failed: true, race: true}}},
	} {
		var stdout bytes.Buffer
		f.stdout = &stdout
		code, err := retry(t.Context(), arguments{}, f, &stdout)
		if code != 1 || err != nil || !strings.HasPrefix(stdout.String(), "== FAILED: ") || strings.Contains(stdout.String(), "at first") {
			t.Errorf("%s: code %d, %v, printed %q", name, code, err, stdout.String())
		}
	}
}
