package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRun runs the tests of a module: one passes, one is skipped, and one fails after a
// subtest that passes.
func TestRun(t *testing.T) {
	dir := module(t, map[string]string{
		"good/good_test.go":  "package good\n\nimport \"testing\"\n\nfunc TestPass(t *testing.T) { t.Log(\"quiet\") }\n\nfunc TestSkip(t *testing.T) { t.Skip(\"no device\\nin this machine\") }\n",
		"bad/bad_test.go":    "package bad\n\nimport \"testing\"\n\nfunc TestFail(t *testing.T) {\n\tt.Run(\"good\", func(t *testing.T) { t.Log(\"quiet\") })\n\tt.Run(\"bad\", func(t *testing.T) { t.Error(\"the cause\") })\n}\n\nfunc TestPass(t *testing.T) { t.Log(\"quiet\") }\n",
		"ugly/ugly_test.go":  "package ugly\n\nimport \"testing\"\n\nfunc TestPanic(t *testing.T) { panic(\"the panic\") }\n",
		"build/build.go":     "package build\n\nvar x int = \"\"\n",
		"build/some_test.go": "package build\n",
	})
	record := filepath.Join(dir, "record")
	var stdout, stderr bytes.Buffer
	code, err := run(t.Context(), []string{"--record", record, "./..."}, &stdout, &stderr)
	if code != 1 || err != nil {
		t.Errorf("code %d, %v\n%s%s", code, err, stdout.String(), stderr.String())
	}
	printed := stdout.String()
	for _, want := range []string{"ok  \texample.com/m/good", "--- FAIL: TestFail", "--- FAIL: TestFail/bad", "the cause", "FAIL\texample.com/m/bad", "the panic", "FAIL\texample.com/m/ugly", "cannot use", "FAIL\texample.com/m/build [build failed]"} {
		if !strings.Contains(printed, want) {
			t.Errorf("%q is not printed", want)
		}
	}
	for _, not := range []string{"quiet", "=== ", "PASS\n", "TestSkip", "TestFail/good"} {
		if strings.Contains(printed, not) {
			t.Errorf("%q is printed", not)
		}
	}
	if t.Failed() {
		t.Log(printed)
	}
	recorded, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"pass\texample.com/m/good\tTestPass\n", "skip\texample.com/m/good\tTestSkip\tgood_test.go:7: no device in this machine\n",
		"pass\texample.com/m/bad\tTestFail/good\n", "pass\texample.com/m/bad\tTestPass\n",
	} {
		if !strings.Contains(string(recorded), want) {
			t.Errorf("%q is not recorded:\n%s", want, recorded)
		}
	}
	if strings.Count(string(recorded), "\n") != 4 {
		t.Errorf("more or less is recorded:\n%s", recorded)
	}
}

// module makes a module of these files the working directory.
func module(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module example.com/m\n\ngo 1.26\n"
	for name, text := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	t.Setenv("GOFLAGS", "")
	t.Setenv("GOWORK", "off")
	return dir
}

// TestUsage: without a file for the record, nothing runs.
func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"./..."}, {"--record"}} {
		if code, err := run(t.Context(), args, nil, nil); code != 2 || err == nil {
			t.Errorf("%q: code %d, %v", args, code, err)
		}
	}
}
