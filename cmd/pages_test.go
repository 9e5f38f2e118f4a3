package cmd_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// notRun are the how-to pages without a block that runs here, and why.
var notRun = map[string]string{
	"extend":         "Go of another module: examples/backend is its program, and has tests",
	"frameworks":     "frameworks that are not installed: python/programs runs them",
	"go-workers":     "parts of programs",
	"lightning":      "Lightning and transformers: python/tests/integrations runs them",
	"notebook":       "PyTorch: python/tests/pages.py runs it",
	"object-storage": "a bucket: TestBucketPages runs it",
	"pytorch":        "PyTorch: python/tests/pages.py runs it",
	"ray":            "Ray: python/tests/integrations/test_ray.py, test_ray_tune.py and ray_kills.py run it",
	"serve":          "servers that run until they are stopped",
	"torch-save":     "PyTorch: python/tests/pages.py runs it",
}

// TestUserPages runs the shell blocks of the pages for users: those of one page in order, in
// an empty directory, with the commands of this tree on the PATH. A block without a
// language after a shell block is its output: its lines must be printed, in their order.
// [TestBucketPages] runs the blocks with a bucket.
func TestUserPages(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob(filepath.Join("..", "docs", "howto", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, filepath.Join("..", "README.md")) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		name, blocks := strings.TrimSuffix(filepath.Base(page), ".md"), blocksOf(string(text))
		blocks = slices.DeleteFunc(blocks, block.inBucket)
		if (len(blocks) == 0) != (notRun[name] != "") {
			t.Errorf("%s has %d blocks that run here; the reason for none: %q", page, len(blocks), notRun[name])
		}
		if len(blocks) == 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkPage(t, blocks, runPage(t, blocks))
		})
	}
}

// checkPage compares what the blocks of a page printed with the output that it shows.
func checkPage(t *testing.T, blocks []block, printed []string) {
	t.Helper()
	for n, b := range blocks {
		if missing := notPrinted(printed[n], b.output); missing != "" {
			t.Errorf("the commands do not print the page's line\n%s\nin its place, but\n%s", missing, printed[n])
		}
	}
}

// block is a shell block of a page, with the output that the page shows for it.
type block struct {
	script string
	output []string
}

// inBucket reports whether a block needs a bucket.
func (b block) inBucket() bool { return strings.Contains(b.script, "s3://") }

var fence = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")

func blocksOf(text string) (blocks []block) {
	shell := false
	for _, m := range fence.FindAllStringSubmatch(text, -1) {
		switch {
		case m[1] == "sh":
			shell = true
			blocks = append(blocks, block{script: m[2]})
		case m[1] != "":
			shell = false
		case shell:
			last := &blocks[len(blocks)-1]
			for line := range strings.Lines(m[2]) {
				if line = strings.TrimSpace(line); line != "" && line != "…" {
					last.output = append(last.output, line)
				}
			}
		}
	}
	return blocks
}

// pageEndpoint is where the nodes of a job meet in the pages.
const pageEndpoint = "127.0.0.1:29400"

// between separates the outputs of two blocks.
const between = "\x01next block\n"

// runPage runs the blocks of a page and returns what each printed. The environment is that of
// this process and more.
func runPage(t *testing.T, blocks []block, more ...string) []string {
	t.Helper()
	dir := t.TempDir()
	fixture, err := filepath.Abs(filepath.Join("..", "internal", "format", "dcp", "testdata", "torch-2.14", "mesh2x2"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(fixture, filepath.Join(dir, "dcp-checkpoint")); err != nil {
		t.Fatal(err)
	}
	endpoint, err := freeEndpoint(t.Context()) // other tests use the pages' port at the same time
	if err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	for n, b := range blocks {
		if n > 0 {
			script.WriteString("printf '\\001next block\\n'\n")
		}
		script.WriteString(strings.ReplaceAll(b.script, pageEndpoint, endpoint))
	}
	ctx, cancel := context.WithTimeout(t.Context(), pageLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script.String())
	cmd.Dir = dir
	// A page's trainers end with its shell.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = slices.Concat(os.Environ(), []string{"XDG_STATE_HOME=" + filepath.Join(dir, ".state")}, more)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	printed := strings.Split(strings.ReplaceAll(string(out), endpoint, pageEndpoint), between)
	if len(printed) != len(blocks) {
		t.Fatalf("%d blocks printed %d parts", len(blocks), len(printed))
	}
	return printed
}

// pageLimit bounds the blocks of one page.
const pageLimit = 4 * time.Minute

// varying is what differs between two runs of the same commands: identities, digests,
// dates, times, durations and paths. python/tests/pages.py has the same pattern.
var varying = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8,}\b|[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?|\b([0-9]+m)?[0-9]+(\.[0-9]+)?(ns|µs|ms|s)\b|/[^\s,;:]+`)

// notPrinted returns the first line of a page that was not printed after the line
// before it, apart from what varies, or "". … stands for any text.
func notPrinted(printed string, lines []string) string {
	rest := strings.Split(alike(printed), "\n")
	for _, line := range lines {
		var parts []string
		for _, part := range strings.Split(line, "…") {
			parts = append(parts, regexp.QuoteMeta(alike(part)))
		}
		pattern := regexp.MustCompile(strings.Join(parts, ".*"))
		at := slices.IndexFunc(rest, pattern.MatchString)
		if at < 0 {
			return line
		}
		rest = rest[at+1:]
	}
	return ""
}

var spaces = regexp.MustCompile(`[ \t]+`)

func alike(s string) string { return spaces.ReplaceAllString(varying.ReplaceAllString(s, "0"), " ") }

// TestPageLines: a line that the commands do not print is found, whatever varies.
func TestPageLines(t *testing.T) {
	t.Parallel()
	printed := "RUN    STEP  SIZE\nmnist  60    42.4 KiB  2026-11-25 18:11:27\nexit code 1\n"
	for lines, want := range map[string]string{
		"mnist 60 42.4 KiB 2026-01-01 00:00:00": "",
		"mnist … KiB\nexit code 1":              "",
		"mnist  60  42.4 MiB":                   "mnist  60  42.4 MiB",
		"mnist  80  42.4 KiB":                   "mnist  80  42.4 KiB",
		"exit code 0":                           "exit code 0",
		"exit code 1\nmnist  60  42.4 KiB":      "mnist  60  42.4 KiB",
	} {
		if got := notPrinted(printed, strings.Split(lines, "\n")); got != want {
			t.Errorf("%q: %q is missing, want %q", lines, got, want)
		}
	}
	blocks := blocksOf("```sh\na\n```\n\n```\nb\n…\n```\n\n```go\nc\n```\n\n```\nd\n```\n")
	if len(blocks) != 1 || blocks[0].script != "a\n" || !slices.Equal(blocks[0].output, []string{"b"}) {
		t.Errorf("blocks %q", blocks)
	}
}
