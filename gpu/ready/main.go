// Command ready checks that this machine's GPUs are ready for training. It checks
// the devices by NVML, and runs a Python script that uses one of them as the
// Python client does.
//
//	inventory, health, assignment         NVML, and what CUDA shows a worker
//	pinned slots, side stream, overlap,   python/gpu/ready.py, with PyTorch
//	first touch, blocking time
//
// Every check passes, fails, or is not run, with the reason. The command needs
// neither a network nor a store.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/gpu"
)

// Exit codes.
const (
	exitOK     = 0 // also if no check could run
	exitFailed = 1
	exitUsage  = 2
)

// report is the output of --json.
type report struct {
	Checks []gpu.Check `json:"checks"`
	Passed int         `json:"passed"`
	Failed int         `json:"failed"`
	NotRun int         `json:"not_run"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr, gpu.Readiness)
	stop()
	os.Exit(code)
}

// run is the whole program. look queries NVML.
func run(ctx context.Context, args []string, stdout, stderr io.Writer, look func(context.Context, *string) ([]gpu.Check, []string)) int {
	flags := flag.NewFlagSet("ready", flag.ContinueOnError)
	flags.SetOutput(stderr)
	asJSON := flags.Bool("json", false, "print the report as JSON")
	limit := flags.Duration("timeout", 9*time.Minute, "time limit for all checks")
	p := &python{}
	flags.StringVar(&p.program, "python", "python3", "Python that has PyTorch")
	flags.StringVar(&p.script, "script", "python/gpu/ready.py", "the Python part")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return exitOK
		}
		return exitUsage
	}
	if flags.NArg() > 0 || *limit <= 0 {
		fmt.Fprintln(stderr, "ready: want flags only, and a --timeout above zero; see --help")
		return exitUsage
	}
	ctx, cancel := context.WithTimeoutCause(ctx, *limit, fmt.Errorf("not finished within %v", *limit))
	defer cancel()
	r := check(ctx, p, look)
	var err error
	if *asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		err = enc.Encode(r)
	} else {
		err = r.print(stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "ready: print the report:", err)
		return exitFailed
	}
	if r.Failed > 0 {
		return exitFailed
	}
	return exitOK
}

// nvmlLimit is how long the driver may take to answer.
const nvmlLimit = time.Minute

func check(ctx context.Context, p *python, look func(context.Context, *string) ([]gpu.Check, []string)) report {
	var visible *string
	if value, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); set {
		visible = &value
	}
	asked, cancel := context.WithTimeout(ctx, nvmlLimit)
	checks, ids := look(asked, visible)
	cancel()
	p.confirm(ctx, checks, ids)
	checks = append(checks, p.checks(ctx)...)
	contradict(checks)
	r := report{Checks: checks}
	for _, c := range checks {
		switch c.Result {
		case gpu.Passed:
			r.Passed++
		case gpu.NotRun:
			r.NotRun++
		default:
			r.Failed++
		}
	}
	return r
}

// contradict fails the inventory if NVML shows no device but PyTorch has used
// one. Otherwise a machine with a half-broken driver would pass as a machine
// without GPUs.
func contradict(checks []gpu.Check) {
	used := ""
	for _, c := range checks[3:] {
		if c.Result != gpu.NotRun {
			used = c.Name
		}
	}
	if first := &checks[0]; first.Result == gpu.NotRun && used != "" {
		first.Result, first.Text = gpu.Failed, fmt.Sprintf("PyTorch has a device (%s was run), but NVML shows none: %s", used, first.Text)
	}
}

// print writes a line for each check, and the totals.
func (r report) print(w io.Writer) error {
	for _, c := range r.Checks {
		if _, err := fmt.Fprintf(w, "%-8s  %-14s  %s\n", c.Result, c.Name, strings.Join(strings.Fields(c.Text), " ")); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "\n%d passed, %d failed, %d not run\n", r.Passed, r.Failed, r.NotRun)
	return err
}
