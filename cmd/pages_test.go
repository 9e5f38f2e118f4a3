package cmd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPages runs the shell blocks of the pages for users: those of one page in order, in
// an empty directory, with the commands of this tree on the PATH. A block without a
// language after a shell block is output: each of its lines must be printed there.
func TestPages(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob(filepath.Join("..", "docs", "howto", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) < 10 {
		t.Fatalf("%d how-to pages: where are the others?", len(pages))
	}
	pages = append(pages, filepath.Join("..", "README.md"), filepath.Join("..", "docs", "tutorial.md"))
	checked := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		script, output := blocksOf(string(text))
		if script == "" {
			continue
		}
		checked += len(output)
		t.Run(strings.TrimSuffix(filepath.Base(page), ".md"), func(t *testing.T) {
			t.Parallel()
			printed := runPage(t, script)
			for _, line := range output {
				if !printedLine(printed, line) {
					t.Errorf("the commands do not print the page's line\n%s\nbut\n%s", line, printed)
				}
			}
		})
	}
	if checked < 50 {
		t.Errorf("%d lines of output were checked: the pages are not read as they are meant", checked)
	}
}

var fence = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")

// blocksOf returns the shell blocks of a page as one script, and the lines of output
// that the page shows for them.
func blocksOf(text string) (script string, output []string) {
	var b strings.Builder
	shell := false
	for _, m := range fence.FindAllStringSubmatch(text, -1) {
		switch m[1] {
		case "sh":
			shell = true
			for line := range strings.Lines(m[2]) {
				if !strings.HasPrefix(line, " ") && strings.TrimSpace(line) != "" {
					b.WriteString("printf '%s\\n' " + quote("$ "+strings.TrimSuffix(line, "\n")) + "\n")
				}
				b.WriteString(line)
			}
		case "":
			if !shell {
				continue
			}
			for line := range strings.Lines(m[2]) {
				if line = strings.TrimSpace(line); line != "" && line != "…" {
					output = append(output, line)
				}
			}
		default:
			shell = false
		}
	}
	return b.String(), output
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func runPage(t *testing.T, script string) string {
	t.Helper()
	dir := t.TempDir()
	fixture, err := filepath.Abs(filepath.Join("..", "internal", "format", "dcp", "testdata", "torch-2.14", "mesh2x2"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(fixture, filepath.Join(dir, "dcp-checkpoint")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(dir, ".state"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// varying is what differs between two runs of the same commands: times, durations,
// identities, digests and sizes.
var varying = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8,}\b|[0-9]+(\.[0-9]+)?(ns|µs|ms|m[0-9.]+s|s)?\b|/[^\s,;:]+`)

// printedLine reports whether a line of a page occurs in what its commands printed,
// apart from what varies. … stands for any text.
func printedLine(printed, line string) bool {
	var parts []string
	for _, part := range strings.Split(line, "…") {
		parts = append(parts, regexp.QuoteMeta(alike(part)))
	}
	return regexp.MustCompile(strings.Join(parts, ".*")).MatchString(alike(printed))
}

var spaces = regexp.MustCompile(`[ \t]+`)

func alike(s string) string { return spaces.ReplaceAllString(varying.ReplaceAllString(s, "0"), " ") }

// TestPageLines: a line that the commands do not print is found, whatever varies.
func TestPageLines(t *testing.T) {
	t.Parallel()
	printed := "RUN    STEP  SIZE\nmnist  60    42.4 KiB  2026-11-25 18:11:27\n"
	for line, want := range map[string]bool{
		"mnist 20 1 KiB 2026-01-01 00:00:00": true,
		"mnist … KiB":                        true,
		"mnist  60  42.4 MiB":                false,
		"bert   60  42.4 KiB":                false,
	} {
		if got := printedLine(printed, line); got != want {
			t.Errorf("%q: %v", line, got)
		}
	}
	script, output := blocksOf("```sh\na\n```\n\n```\nb\n…\n```\n\n```go\nc\n```\n\n```\nd\n```\n")
	if script != "printf '%s\\n' '$ a'\na\n" || len(output) != 1 || output[0] != "b" {
		t.Errorf("script %q, output %q", script, output)
	}
}
