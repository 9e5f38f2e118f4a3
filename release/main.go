// Command release makes the packages of a release from this tree: wheels, deb, rpm, an
// OCI image, a bill of materials and checksums. `task release` runs it.
//
// The same tree and the same tools give the same bytes: programs have no path of the
// machine, and every time in a package is the time of the commit.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A release is what all packages of one run of this program share.
type release struct {
	root    string // of the repository
	out     string // the directory of the packages
	work    string // a directory for programs and other parts
	python  string // an interpreter with release/requirements.txt
	version string // in python/pyproject.toml
	commit  string
	date    time.Time // of the commit
	arches  []string  // the processors, by the names of Go
	glibc   map[string]base
	pools   []string // where glibc is fetched
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	r := release{glibc: glibc, pools: pools}
	f := flag.NewFlagSet("release", flag.ContinueOnError)
	f.StringVar(&r.root, "root", "..", "the repository")
	f.StringVar(&r.out, "out", "../dist", "directory for the packages, which must be empty or new")
	f.StringVar(&r.python, "python", "python3", "interpreter that has release/requirements.txt")
	arches := f.String("arch", "amd64,arm64", "the processors, separated by commas")
	only := f.String("only", "", "make only this: wheels, packages or image (default: all, and the bill of materials)")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", f.Arg(0))
	}
	steps := []func(context.Context) error{r.programs, r.wheels, r.packages, r.image, r.bill}
	if *only != "" {
		one := map[string]func(context.Context) error{"wheels": r.wheels, "packages": r.packages, "image": r.image}[*only]
		if one == nil {
			return fmt.Errorf("--only %s: want wheels, packages or image", *only)
		}
		steps = []func(context.Context) error{r.programs, one}
	}
	for arch := range strings.SplitSeq(*arches, ",") {
		if machines[arch] == "" {
			return fmt.Errorf("--arch %s: want amd64, arm64 or both", *arches)
		}
		r.arches = append(r.arches, arch)
	}
	if err := r.prepare(ctx); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(r.work) }()
	for _, make := range steps {
		if err := make(ctx); err != nil {
			return err
		}
	}
	return r.sums(stdout)
}

// prepare finds out what is released, and makes the directories.
func (r *release) prepare(ctx context.Context) (err error) {
	for _, dir := range []*string{&r.root, &r.out} {
		if *dir, err = filepath.Abs(*dir); err != nil {
			return err
		}
	}
	if strings.Contains(r.python, "/") { // other directories are current for some commands
		if r.python, err = filepath.Abs(r.python); err != nil {
			return err
		}
	}
	text, err := os.ReadFile(filepath.Join(r.root, "python", "pyproject.toml"))
	if err != nil {
		return err
	}
	found := regexp.MustCompile(`(?m)^version = "([^"]+)"$`).FindSubmatch(text)
	if found == nil {
		return errors.New("python/pyproject.toml has no version")
	}
	r.version = string(found[1])
	// The clone may belong to another user.
	head, err := r.output(ctx, r.root, "git", "-c", "safe.directory=*", "log", "-1", "--abbrev=12", "--format=%h %ct")
	if err != nil {
		return err
	}
	commit, seconds, _ := strings.Cut(strings.TrimSpace(head), " ")
	at, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return fmt.Errorf("git log: %q has no time: %w", head, err)
	}
	changed, err := r.output(ctx, r.root, "git", "-c", "safe.directory=*", "status", "--porcelain", "--untracked-files=no")
	if err != nil {
		return err
	}
	if changed != "" {
		commit += "+changes"
	}
	r.commit, r.date = commit, time.Unix(at, 0).UTC()
	// hatchling and the library for rpm read it.
	if err := os.Setenv("SOURCE_DATE_EPOCH", seconds); err != nil {
		return err
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	present, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	if len(present) > 0 {
		return fmt.Errorf("--out %s has files, such as %s: name an empty directory", r.out, present[0].Name())
	}
	r.work, err = os.MkdirTemp("", "release-")
	return err
}

// output runs a command in a directory, and returns what it prints.
func (r *release) output(ctx context.Context, dir, name string, args ...string) (string, error) {
	return commandOutput(ctx, dir, nil, name, args...)
}

func commandOutput(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir, c.Env, c.Stderr = dir, append(os.Environ(), env...), os.Stderr
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return string(out), nil
}

// made returns the sorted names of the packages.
func (r *release) made() ([]string, error) {
	entries, err := os.ReadDir(r.out)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return names, err
}

// sums writes SHA256SUMS, which `sha256sum --check` reads, and prints it.
func (r *release) sums(stdout io.Writer) error {
	names, err := r.made()
	if err != nil {
		return err
	}
	var lines strings.Builder
	for _, name := range names {
		sum, err := digest(filepath.Join(r.out, name))
		if err != nil {
			return err
		}
		fmt.Fprintf(&lines, "%s  %s\n", sum, name)
	}
	fmt.Fprint(stdout, lines.String())
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(lines.String()), 0o644)
}

// digest returns the SHA-256 of a file in hexadecimal.
func digest(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
