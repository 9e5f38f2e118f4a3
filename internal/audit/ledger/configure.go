package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// noWitness is the policy without witnesses.
const noWitness = "quorum none\n"

// WitnessesOptions configure [SetWitnesses].
type WitnessesOptions struct {
	Store    string // its directory
	Policy   string // in the form of C2SP tlog-policy; empty: as configured before
	Optional bool   // see [Config]
}

// WitnessState is what a witness answered when it was configured.
type WitnessState struct {
	URL   string `json:"url"`
	Size  int64  `json:"size"`            // of the head of this log that it knows
	Error string `json:"error,omitempty"` // it gave no answer, or not a good one
}

// SetWitnesses changes the witnesses of a store that keeps evidence, from its next owner
// on. It asks each whether it knows the log, and changes nothing if one does not; with
// Optional it accepts a witness that gives no answer. When it returns nil, the change is durable.
func SetWitnesses(ctx context.Context, o WitnessesOptions) ([]WitnessState, error) {
	bad := func(err error) ([]WitnessState, error) { return nil, fmt.Errorf("audit configure: %w", err) }
	c, err := ReadConfig(o.Store)
	if err != nil {
		return bad(err)
	}
	c.Optional = o.Optional
	if o.Policy != "" {
		if err := c.fits(o.Policy); err != nil {
			return bad(err)
		}
		c.Policy = withoutLogs(o.Policy)
	}
	ws, err := witnessesOf(c.Policy)
	if err != nil {
		return bad(err)
	}
	defer ws.close()
	states := []WitnessState{}
	if len(ws.list) > 0 {
		signed, size, err := c.shown(o.Store)
		if err != nil {
			return bad(err)
		}
		var refused error
		if states, refused = ws.states(ctx, signed, size, o.Optional); refused != nil {
			return bad(refused)
		}
	}
	if err := Configure(o.Store, c); err != nil {
		return bad(err)
	}
	return states, nil
}

// fits checks that a policy which names logs names this one: otherwise it is a policy for
// another store.
func (c Config) fits(policy string) error {
	p, err := audit.ParsePolicy(policy)
	if err != nil {
		return err
	}
	own, err := note.NewVerifier(c.Key)
	if err != nil {
		return fmt.Errorf("%w: the verifier key: %w", ErrDamaged, err)
	}
	if len(p.Logs) > 0 && !slices.ContainsFunc(p.Logs, func(v note.Verifier) bool { return v.Name() == own.Name() && v.KeyHash() == own.KeyHash() }) {
		return problem.Errorf(problem.Invalid, "the policy is of other logs: it has no line `log %s`", c.Key)
	}
	return nil
}

// withoutLogs returns the lines of a policy that name no log: the log of a store is that of
// its configuration. Keys that sign decisions are for verifiers.
func withoutLogs(policy string) string {
	var out strings.Builder
	for line := range strings.Lines(policy) {
		if fields := strings.Fields(line); (len(fields) == 0 || fields[0] != "log") && !audit.SignatureLine(line) {
			out.WriteString(line)
		}
	}
	return out.String()
}

// shown returns a signed note to show to a witness, and its size: the published one, or
// that of a log without entries.
func (c Config) shown(store string) ([]byte, int64, error) {
	b := &Book{store: store, config: c}
	signed, h, err := b.Checkpoint()
	if !errors.Is(err, ErrOff) {
		return signed, h.Size, err
	}
	signer, err := c.signer(store)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, 0, fmt.Errorf("no head was published yet, and the signing key cannot be read, so the witnesses cannot be asked: run this where it can be read: %w", err)
	}
	if err != nil {
		return nil, 0, err
	}
	signed, err = audit.Sign(emptyHead(c.Origin), signer)
	return signed, 0, err
}

// states asks each witness what it knows. Its error names those that refuse, and those
// that do not answer unless that is optional.
func (ws *witnesses) states(ctx context.Context, signed []byte, size int64, optional bool) (list []WitnessState, err error) {
	states := map[string]WitnessState{}
	var errs []error
	ws.ask(ctx, ws.list, func(ctx context.Context, w *witnessed) ([]byte, error) { return w.post(ctx, 0, nil, signed) }, func(a answer) bool {
		s := WitnessState{URL: a.url, Size: size}
		var knows *knowsError
		var refused *refusedError
		switch {
		case errors.As(a.err, &knows):
			s.Size = knows.size
		case a.err != nil:
			s.Size, s.Error = 0, a.err.Error()
			if errors.As(a.err, &refused) || !optional {
				errs = append(errs, a.err)
			}
		}
		states[a.url] = s
		return false
	})
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if len(errs) > 0 {
		return nil, problem.Errorf(problem.Unavailable, "%w; nothing was changed", errors.Join(errs...))
	}
	for _, w := range ws.list {
		list = append(list, states[w.url])
	}
	return list, nil
}
