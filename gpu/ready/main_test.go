package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/gpu"
)

const uuid = "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5"

// none simulates a machine without a driver.
func none(context.Context, *string) ([]gpu.Check, []string) {
	return []gpu.Check{
		{Name: gpu.CheckInventory, Result: gpu.NotRun, Text: "no NVIDIA driver found"},
		{Name: gpu.CheckHealth, Result: gpu.NotRun, Text: "no NVIDIA driver found"},
		{Name: gpu.CheckAssignment, Result: gpu.NotRun, Text: "no NVIDIA driver found"},
	}, nil
}

// one simulates a machine with a healthy device.
func one(context.Context, *string) ([]gpu.Check, []string) {
	return []gpu.Check{
		{Name: gpu.CheckInventory, Result: gpu.Passed, Text: "a device"},
		{Name: gpu.CheckHealth, Result: gpu.Passed, Text: "well"},
		{Name: gpu.CheckAssignment, Result: gpu.Passed, Text: "1 worker"},
	}, []string{"GPU-" + uuid}
}

// script writes a Python part that replaces the real one.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ready.py")
	if err := os.WriteFile(path, []byte("import json, sys\n"+text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// reports writes a script that reports the result of each check, "passed" by
// default.
func reports(t *testing.T, seen, results string) string {
	return script(t, fmt.Sprintf(`
if sys.argv[1:] == ["--uuids"]:
    print(json.dumps(%s))
    sys.exit()
results = %s
for name in ["pinned slots", "side stream", "overlap", "first touch", "blocking time"]:
    if results.get(name) != "silent":
        print(json.dumps({"check": name, "result": results.get(name, "passed"), "text": "saw " + name, "figures": {"x": 1.5}}), flush=True)
    if results.get(name) == "dies":
        sys.exit("killed")
`, seen, results))
}

func ready(t *testing.T, look func(context.Context, *string) ([]gpu.Check, []string), args ...string) (code int, got report) {
	t.Helper()
	var out, said strings.Builder
	code = run(t.Context(), append([]string{"--json"}, args...), &out, &said, look)
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatalf("%v: %s%s", err, out.String(), said.String())
	}
	if len(got.Checks) != 8 || got.Passed+got.Failed+got.NotRun != 8 {
		t.Fatalf("report %+v", got)
	}
	for _, c := range got.Checks {
		if c.Text == "" {
			t.Errorf("%s gives no reason", c.Name)
		}
	}
	return code, got
}

// TestWithoutGPU runs the real script: without a device, every check is not run,
// with a reason, and the program succeeds.
func TestWithoutGPU(t *testing.T) {
	// A machine with devices hides them from CUDA.
	t.Setenv("CUDA_VISIBLE_DEVICES", "")
	var out, said strings.Builder
	code := run(t.Context(), []string{"--script", filepath.Join("..", "..", "python", "gpu", "ready.py")}, &out, &said, none)
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 10 || lines[9] != "0 passed, 0 failed, 8 not run" {
		t.Fatalf("printed:\n%s%s", out.String(), said.String())
	}
	line := regexp.MustCompile(`^not run   [a-z ]{14}  \S.{10,}$`)
	for _, l := range lines[:8] {
		if !line.MatchString(l) {
			t.Errorf("line %q", l)
		}
	}
}

// TestResults: the report contains the result of each part, and one failure fails
// the program.
func TestResults(t *testing.T) {
	sees := fmt.Sprintf(`{"uuids": [%q]}`, uuid)
	for name, c := range map[string]struct {
		look          func(context.Context, *string) ([]gpu.Check, []string)
		seen, results string
		code          int
		check         string // which has
		result        gpu.Result
		text          string
	}{
		"all pass":            {one, sees, `{}`, 0, "blocking time", gpu.Passed, "saw blocking time"},
		"CUDA confirms":       {one, sees, `{}`, 0, "assignment", gpu.Passed, "CUDA shows each worker its device alone"},
		"no CUDA library":     {one, `{"not_run": "libcuda.so.1: not there"}`, `{}`, 0, "assignment", gpu.Passed, "not confirmed by CUDA: libcuda.so.1"},
		"another device":      {one, `{"uuids": ["ffff"]}`, `{}`, 1, "assignment", gpu.Failed, `is shown ["ffff"]`},
		"more than one":       {one, fmt.Sprintf(`{"uuids": [%q, "ffff"]}`, uuid), `{}`, 1, "assignment", gpu.Failed, "ffff"},
		"one fails":           {one, sees, `{"overlap": "failed"}`, 1, "overlap", gpu.Failed, "saw overlap"},
		"one is not run":      {one, sees, `{"first touch": "not run"}`, 0, "first touch", gpu.NotRun, "saw first touch"},
		"one is not told of":  {one, sees, `{"overlap": "silent"}`, 1, "overlap", gpu.Failed, "without reporting it"},
		"nonsense":            {one, sees, `{"overlap": "fine"}`, 1, "overlap", gpu.Failed, `"fine"`},
		"the script dies":     {one, sees, `{"side stream": "dies"}`, 1, "blocking time", gpu.Failed, "exit status 1: killed"},
		"NVML shows nothing":  {none, sees, `{}`, 1, "inventory", gpu.Failed, "PyTorch has a device"},
		"nothing and nothing": {none, sees, `{n: "not run" for n in ["pinned slots", "side stream", "overlap", "first touch", "blocking time"]}`, 0, "inventory", gpu.NotRun, "no NVIDIA driver"},
	} {
		t.Run(name, func(t *testing.T) {
			code, got := ready(t, c.look, "--script", reports(t, c.seen, c.results))
			if code != c.code {
				t.Errorf("exit code %d, want %d: %+v", code, c.code, got)
			}
			for _, check := range got.Checks {
				if check.Name == c.check && (check.Result != c.result || !strings.Contains(check.Text, c.text)) {
					t.Errorf("%+v, want %s and %q", check, c.result, c.text)
				}
			}
		})
	}
}

// TestScriptCannotRun: without Python, or without the script, its checks are not
// run. A script that hangs is killed, and its checks fail.
func TestScriptCannotRun(t *testing.T) {
	for name, args := range map[string][]string{
		"no Python": {"--python", "no-such-python", "--script", script(t, "")},
		"no script": {"--script", filepath.Join(t.TempDir(), "absent.py")},
	} {
		t.Run(name, func(t *testing.T) {
			if code, got := ready(t, one, args...); code != 0 || got.NotRun != 5 || got.Passed != 3 {
				t.Errorf("exit code %d: %+v", code, got)
			}
		})
	}
	code, got := ready(t, none, "--timeout", "200ms", "--script", script(t, "import time; time.sleep(600)"))
	if code != 1 || got.Failed < 5 || !strings.Contains(got.Checks[7].Text, "not finished within 200ms") {
		t.Errorf("hanging script: exit code %d, %+v", code, got)
	}
}

// TestUsage: mistakes in the command line run nothing.
func TestUsage(t *testing.T) {
	for _, args := range [][]string{{"--nonsense"}, {"argument"}, {"--timeout", "0s"}} {
		var out, said strings.Builder
		if code := run(t.Context(), args, &out, &said, none); code != exitUsage || said.Len() == 0 || out.Len() > 0 {
			t.Errorf("%v: exit code %d, %q", args, code, out.String())
		}
	}
}
