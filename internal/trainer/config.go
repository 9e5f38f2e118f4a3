package trainer

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// config converts the flags and the command to a configuration, or returns why it
// cannot.
func (o runOptions) config(ctx context.Context, args []string, log *slog.Logger) (launch.Config, error) {
	bad := func(format string, args ...any) (launch.Config, error) {
		return launch.Config{}, fmt.Errorf("%w: %s", launch.ErrConfig, fmt.Sprintf(format, args...))
	}
	if len(args) == 0 {
		return bad("no command to run: trainer %s [flags] -- COMMAND [ARG...]", o.use)
	}
	where, err := o.placed(os.Getenv)
	if err != nil {
		return launch.Config{}, err
	}
	if o.maxRestarts < -1 {
		return bad("--max-restarts %d: give 0 or more, or -1 for any number", o.maxRestarts)
	}
	if o.maxNodeFailures < 0 {
		return bad("--max-node-failures %d: give 1 or more, or 0 to exclude no node", o.maxNodeFailures)
	}
	if o.growInterval < 0 || o.growInterval > session.MaxDuration {
		return bad("--grow-interval %v: give a duration such as 5m and at most %v, or 0 for never", o.growInterval, session.MaxDuration)
	}
	if err := nodes.CheckTimeout(o.nodeTimeout); err != nil {
		return bad("--node-timeout %v", err)
	}
	memory, err := o.staging()
	if err != nil {
		return launch.Config{}, err
	}
	for _, d := range o.durations() {
		if d.value <= 0 || d.value > session.MaxDuration {
			return bad("--%s %v: give a duration of more than 0, such as 30s, and at most %v", d.flag, d.value, session.MaxDuration)
		}
	}
	if err := o.hangOptions.check(); err != nil {
		return launch.Config{}, err
	}
	var nproc int
	var devices launch.BackendConfig
	var notes []string
	switch {
	case !o.coordinatorOnly:
		if nproc, devices, notes, err = o.resolve(ctx, thisMachine(), o.nproc); err != nil {
			return launch.Config{}, err
		}
	case where.max == 1:
		return bad("--coordinator-only: a job on one node has no other node for the workers; give --nnodes too, or leave it out")
	case !where.ranked:
		return bad("--coordinator-only: give this node a number too, --node-rank, because it is no node of a group")
	}
	torch, more, err := o.torch(where.max > 1)
	if err != nil {
		return launch.Config{}, err
	}
	notes = append(notes, more...)
	for _, note := range notes {
		log.Warn(note)
	}
	config, err := parseSet(o.set)
	if err != nil {
		return launch.Config{}, err
	}
	names, err := redact.More(o.redact...)
	if err != nil {
		return bad("--redact: %s", err)
	}
	args, run, err := o.command(args)
	if err != nil {
		return launch.Config{}, err
	}
	if o.name == "" {
		o.name = run
	}
	if err := store.ValidRun(o.name); err != nil {
		return bad("--name %q: %s; choose another", o.name, err)
	}
	if o.keep != "" {
		if _, err := retention.Parse(o.keep); err != nil {
			return bad("--keep: %s", err)
		}
	}
	if err := checkReference(o.resume); err != nil {
		return launch.Config{}, fmt.Errorf("--resume: %w", err)
	}
	cfg := launch.Config{
		Config: session.Config{
			Run: o.name, Trial: projections.DefaultTrial, Job: store.NewID(), TrialConfig: config, Nodes: session.OneNode(nproc),
			StrictReplicas: o.strictReplicas, Redact: names,
			StagingSlots: o.stagingSlots, StagingMemory: memory, WhenBusy: staging.WhenBusy(o.whenBusy),
			SaveTimeout: o.saveTimeout, DrainTimeout: o.drain, Collective: o.collective,
			NewID: store.NewID,
		},
		Command: args, MaxRestarts: o.maxRestarts, Preload: o.preload, Resume: o.resume,
		Backend: o.backend, BackendConfig: devices, Torch: torch, Standby: o.coordinatorOnly,
		Grace: o.grace, HangTimeout: o.hangTimeout, ExitCode: exitCode,
	}
	err = o.supervisionOptions.apply(ctx, &cfg, time.Now())
	return cfg, err
}

// duration is the value of a flag.
type duration struct {
	flag  string
	value time.Duration
}

func (o runOptions) durations() []duration {
	return []duration{
		{"save-timeout", o.saveTimeout},
		{"drain-timeout", o.drain},
		{"grace", o.grace},
		{"collective-timeout", o.collective},
		{"wait", o.wait},
		{"endpoint-wait", o.endpointWait},
		{"last-call", o.lastCall},
	}
}

// defaultRun names a run after its script, or else its program.
func defaultRun(command []string) string {
	for _, arg := range command {
		if strings.HasSuffix(arg, ".py") {
			return strings.TrimSuffix(filepath.Base(arg), ".py")
		}
	}
	return filepath.Base(command[0])
}

func parseSet(pairs []string) (map[string]any, error) {
	config := map[string]any{}
	for _, pair := range pairs {
		key, text, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("%w: --set %q: want KEY=VALUE", launch.ErrConfig, pair)
		}
		var value any
		if json.Unmarshal([]byte(text), &value) != nil {
			value = text
		}
		config[key] = value
	}
	return config, nil
}

// checkReference rejects references that no store could resolve, before a store
// is opened.
func checkReference(ref string) error {
	bad := func(why string) error { return fmt.Errorf("%w %q: %s", projections.ErrReference, ref, why) }
	if ref == "" {
		return bad("it is empty; write auto, none, require, RUN or RUN@NAME")
	}
	if strings.ContainsFunc(ref, unicode.IsControl) {
		return bad("it has a control character")
	}
	at := strings.LastIndexByte(ref, '@')
	what := ref[at+1:]
	if what == "" {
		return bad("nothing after the \"@\"; write RUN@NAME, RUN@latest or RUN@best:METRIC:min")
	}
	rest, best := strings.CutPrefix(what, "best:")
	if !best || at < 0 {
		return nil
	}
	colon := strings.LastIndexByte(rest, ':')
	if mode := rest[colon+1:]; colon < 1 || mode != "min" && mode != "max" {
		return bad("write RUN@best:METRIC:min or RUN@best:METRIC:max")
	}
	return nil
}
