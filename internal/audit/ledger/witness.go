package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// The owner asks witnesses by C2SP tlog-witness:
//
//	POST <url>/add-checkpoint     old SIZE, proof, empty line, note
//	200                           cosignatures: lines of a signed note
//	409 text/x.tlog.size          the size of the head that the witness knows
const (
	sizeType      = "text/x.tlog.size"
	witnessWithin = 5 * time.Second
	answerMost    = 1 << 16
)

// ErrRolledBack reports that a witness knows a later head of the log than this store has.
var ErrRolledBack = problem.New(problem.Damage, "rolled back")

// witnessed is a witness and what it knows.
type witnessed struct {
	url   string
	key   note.Verifier
	size  int64 // that it knows
	asked bool  // size is what it answered
}

func witnessesOf(policy string) (list []*witnessed, err error) {
	p, err := audit.ParsePolicy(policy)
	if err != nil {
		return nil, err
	}
	for url, key := range p.Witnesses.Endpoints() {
		list = append(list, &witnessed{url: url, key: key})
	}
	slices.SortFunc(list, func(a, b *witnessed) int { return strings.Compare(a.url, b.url) })
	return list, nil
}

// knowsError is the answer that a witness knows another size than the request names.
type knowsError struct {
	url  string
	size int64
}

func (e *knowsError) Error() string {
	return fmt.Sprintf("witness %s knows a head of size %d", e.url, e.size)
}

// post sends a head. It returns the cosignature lines that the witness's key verifies.
func (w *witnessed) post(ctx context.Context, old int64, proof tlog.TreeProof, signed []byte) ([]byte, error) {
	bad := func(err error) ([]byte, error) { return nil, fmt.Errorf("witness %s: %w", w.url, err) }
	var body bytes.Buffer
	fmt.Fprintf(&body, "old %d\n", old)
	for _, h := range proof {
		body.WriteString(base64.StdEncoding.EncodeToString(h[:]) + "\n")
	}
	body.WriteString("\n")
	body.Write(signed)
	ctx, cancel := context.WithTimeout(ctx, witnessWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, &body)
	if err != nil {
		return bad(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return bad(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerMost))
	if err != nil {
		return bad(err)
	}
	switch {
	case resp.StatusCode == http.StatusOK:
	case resp.StatusCode == http.StatusConflict && resp.Header.Get("Content-Type") == sizeType:
		size, err := strconv.ParseInt(strings.TrimSpace(string(answer)), 10, 64)
		if err != nil || size < 0 {
			return bad(fmt.Errorf("it answered the size %q", answer))
		}
		return nil, &knowsError{w.url, size}
	default:
		return bad(fmt.Errorf("it answered %s: %.200q", resp.Status, answer))
	}
	n, err := note.Open(append(slices.Clone(signed), answer...), note.VerifierList(w.key))
	if err != nil || len(n.Sigs) == 0 {
		return bad(errors.Join(errors.New("its cosignature does not verify by the key of the policy"), err))
	}
	return answer, nil
}

// askFirst asks each witness for the head that it knows, before the owner appends. A
// store whose whole directory was put back is consistent in itself: only witnesses know.
func (k *Keeper) askFirst(ctx context.Context) error {
	if len(k.witnesses) == 0 {
		return nil
	}
	signed, err := k.present()
	if err != nil {
		return fmt.Errorf("ask the witnesses: %w", err)
	}
	var unheard []error
	for _, w := range k.witnesses {
		_, err := w.post(ctx, 0, nil, signed)
		var knows *knowsError
		switch {
		case errors.As(err, &knows):
			w.size, w.asked = knows.size, true
			if knows.size > k.head.Size {
				return fmt.Errorf("%w: the witness %s knows a head of size %d, and this store has %v: its directory was replaced by an older state: put the newest one back, or `ckptstore recover` the checkpoints into a new log", ErrRolledBack, w.url, knows.size, k.head)
			}
		case err == nil:
			w.size, w.asked = k.head.Size, true
		default:
			unheard = append(unheard, err)
		}
	}
	if len(unheard) == len(k.witnesses) {
		if !k.config.Lax {
			return problem.Errorf(problem.Unavailable, "no witness answers, so this store may be an older state of itself: %w: try again when one answers, or set \"optional\": true in audit/%s", errors.Join(unheard...), configName)
		}
		k.o.Logger.Warn("audit: no witness answers; an older state of this store would not be noticed", "error", errors.Join(unheard...))
	}
	return nil
}

// present returns a signed note of the newest head.
func (k *Keeper) present() ([]byte, error) {
	if k.signer == nil {
		signed, _, err := k.Checkpoint()
		return signed, err
	}
	h := k.head
	if h.Size == 0 {
		root, err := tlog.TreeHash(0, nil)
		if err != nil {
			return nil, err
		}
		h.Root = root
	}
	return audit.Sign(h, k.signer)
}

// witness collects cosignatures of a head. Its error matches [audit.ErrPolicy] where
// there are not enough for the policy: the head is not published then.
func (k *Keeper) witness(ctx context.Context, h audit.Head, signed []byte) ([]byte, error) {
	policy, err := audit.ParsePolicy(k.config.Policy)
	if err != nil || len(k.witnesses) == 0 {
		return signed, err
	}
	out := slices.Clone(signed)
	var failed []error
	for _, w := range k.witnesses {
		lines, err := k.cosign(ctx, w, h, signed)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		out = append(out, lines...)
	}
	if !policy.Witnesses.Satisfied(out) {
		return nil, fmt.Errorf("%w: head with %v lacks cosignatures: %w", audit.ErrPolicy, h, errors.Join(failed...))
	}
	return out, nil
}

// cosign asks one witness, twice if it knows another size than was believed.
func (k *Keeper) cosign(ctx context.Context, w *witnessed, h audit.Head, signed []byte) ([]byte, error) {
	for again := false; ; again = true {
		var proof tlog.TreeProof
		if w.size > h.Size {
			return nil, fmt.Errorf("%w: witness %s knows a head of size %d, this store has %v", ErrRolledBack, w.url, w.size, h)
		}
		if w.size > 0 && w.size < h.Size {
			var err error
			if proof, err = tlog.ProveTree(h.Size, w.size, k.hashes(ctx, h)); err != nil {
				return nil, tampered(err)
			}
		}
		lines, err := w.post(ctx, w.size, proof, signed)
		var knows *knowsError
		if errors.As(err, &knows) && !again && knows.size != w.size {
			w.size = knows.size
			continue
		}
		if err == nil {
			w.size = h.Size
		}
		return lines, err
	}
}
