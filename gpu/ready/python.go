package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/gpu"
)

// pythonChecks are the checks of the script, in its order.
var pythonChecks = []string{"pinned slots", "side stream", "overlap", "first touch", "blocking time"}

// python runs the script.
type python struct {
	program, script string
}

// start runs the script and returns its output. why is the reason if it cannot
// run at all.
func (p *python) start(ctx context.Context, env []string, args ...string) (out []byte, why string, err error) {
	if _, err := os.Stat(p.script); err != nil {
		return nil, fmt.Sprintf("the script is not there: %v; name it with --script", err), nil
	}
	program, err := exec.LookPath(p.program)
	if err != nil {
		return nil, fmt.Sprintf("no Python: %v; name one with --python", err), nil
	}
	cmd := exec.CommandContext(ctx, program, append([]string{p.script}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	// If the driver hangs, so does its process: its children must not block us.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err = cmd.Output()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", p.script, err, tail(said.String()))
	}
	return out, "", err
}

// tail returns the end of a text, on one line.
func tail(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	const most = 500
	if len(text) > most {
		text = "… " + strings.ToValidUTF8(text[len(text)-most:], "")
	}
	return text
}

// checks runs the script's checks. A check that it does not report has failed:
// the process died or hung in it.
func (p *python) checks(ctx context.Context) []gpu.Check {
	out, why, err := p.start(ctx, nil)
	told := map[string]gpu.Check{}
	for line := range bytes.Lines(out) {
		var c gpu.Check
		if json.Unmarshal(line, &c) == nil {
			told[c.Name] = c
		}
	}
	var all []gpu.Check
	for _, name := range pythonChecks {
		c, ok := told[name]
		switch {
		case why != "":
			c = gpu.Check{Name: name, Result: gpu.NotRun, Text: why}
		case !ok && err == nil:
			c = gpu.Check{Name: name, Result: gpu.Failed, Text: p.script + " ended without reporting it: " + tail(string(out))}
		case !ok:
			c = gpu.Check{Name: name, Result: gpu.Failed, Text: err.Error()}
		case c.Result != gpu.Passed && c.Result != gpu.Failed && c.Result != gpu.NotRun, c.Text == "":
			c = gpu.Check{Name: name, Result: gpu.Failed, Text: fmt.Sprintf("%s reports %q and %q", p.script, c.Result, c.Text)}
		}
		all = append(all, c)
	}
	if err != nil && len(told) == len(pythonChecks) {
		last := &all[len(all)-1]
		last.Result, last.Text = gpu.Failed, fmt.Sprintf("%s; then %v", last.Text, err)
	}
	return all
}

// confirm asks CUDA what a worker sees when assigned each of the devices, and
// adds it to the assignment check.
func (p *python) confirm(ctx context.Context, checks []gpu.Check, ids []string) {
	for i := range checks {
		if c := &checks[i]; c.Name == gpu.CheckAssignment && c.Result == gpu.Passed {
			why, err := p.confirmed(ctx, ids)
			switch {
			case err != nil:
				c.Result, c.Text = gpu.Failed, fmt.Sprintf("%s; %v", c.Text, err)
			case why != "":
				c.Text += "; not confirmed by CUDA: " + why
			default:
				c.Text += "; CUDA shows each worker its device alone"
			}
		}
	}
}

func (p *python) confirmed(ctx context.Context, ids []string) (why string, err error) {
	for _, id := range ids {
		out, why, err := p.start(ctx, []string{"CUDA_VISIBLE_DEVICES=" + id}, "--uuids")
		if why != "" || err != nil {
			return why, err
		}
		var sees struct {
			UUIDs  []string `json:"uuids"`
			NotRun string   `json:"not_run"`
		}
		if err := json.Unmarshal(out, &sees); err != nil {
			return "", errors.Join(err, errors.New(tail(string(out))))
		}
		if sees.NotRun != "" {
			return sees.NotRun, nil
		}
		if len(sees.UUIDs) != 1 || !strings.EqualFold("GPU-"+sees.UUIDs[0], id) && !strings.EqualFold("MIG-"+sees.UUIDs[0], id) {
			return "", fmt.Errorf("a worker with CUDA_VISIBLE_DEVICES=%s is shown %q by CUDA", id, sees.UUIDs)
		}
	}
	return "", nil
}
