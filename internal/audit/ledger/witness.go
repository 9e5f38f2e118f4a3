package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
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
//	409, 422                      the witness has cosigned a head that this one does not continue
//	403, 404                      it has another key for the origin, or does not know the origin
const (
	sizeType      = "text/x.tlog.size"
	witnessWithin = 5 * time.Second // one request, or one connection
	answerMost    = 1 << 16
)

// ErrRolledBack reports that a witness knows a later head of the log than this store has.
var ErrRolledBack = problem.New(problem.Damage, "rolled back")

// witnessed is a witness and what this process knows of it. Only one goroutine uses it at
// a time.
type witnessed struct {
	url    string
	key    note.Verifier
	client *http.Client
	size   int64 // of the head that it knows, as far as it has answered

	rest
}

// newClient returns the HTTP client for witnesses. Connections that are being made end
// with life.
func newClient(life context.Context) *http.Client {
	dialer := net.Dialer{Timeout: witnessWithin}
	return &http.Client{
		// A redirect could lead to a server that is no witness.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				defer context.AfterFunc(life, cancel)()
				return dialer.DialContext(ctx, network, address)
			},
			ForceAttemptHTTP2:     true,
			TLSHandshakeTimeout:   witnessWithin,
			ResponseHeaderTimeout: witnessWithin,
			IdleConnTimeout:       30 * time.Second,
		},
	}
}

// knowsError is the answer that a witness knows another size than the request names.
type knowsError struct {
	url  string
	size int64
}

func (e *knowsError) Error() string {
	return fmt.Sprintf("witness %s knows a head of size %d", e.url, e.size)
}

// refusedError is an answer that gives neither cosignatures nor a size.
type refusedError struct {
	url    string
	status int
	text   string
}

func (e *refusedError) Error() string {
	next := ""
	switch e.status {
	case http.StatusForbidden:
		next = ": it has another key for this log: give it the key that `ckptstore audit keygen` printed"
	case http.StatusNotFound:
		next = ": it does not know this log: register the log's key there first, as by `ckptstore audit witness --log KEY`"
	}
	return fmt.Sprintf("witness %s answered %d %s (%q)%s", e.url, e.status, http.StatusText(e.status), e.text, next)
}

// forks reports whether the answer to a request with an old size is that the witness has
// cosigned a head that the new one does not continue.
func (e *refusedError) forks(old, size int64) bool {
	return old > 0 && (e.status == http.StatusConflict && old == size || e.status == http.StatusUnprocessableEntity && old < size)
}

// post sends a head. It returns the cosignature lines that the witness's key verifies, and
// nothing else of the answer.
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
	resp, err := w.client.Do(req)
	if err != nil {
		return bad(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerMost))
	if err != nil {
		return bad(err)
	}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case resp.StatusCode == http.StatusOK:
	case resp.StatusCode == http.StatusConflict && kind == sizeType:
		size, err := strconv.ParseInt(strings.TrimSpace(string(answer)), 10, 64)
		if err != nil || size < 0 {
			return bad(fmt.Errorf("it answered the size %.40q", answer))
		}
		return nil, &knowsError{w.url, size}
	default:
		return nil, &refusedError{w.url, resp.StatusCode, strings.TrimSpace(fmt.Sprintf("%.200s", answer))}
	}
	// The answer may hold anything, also another note: what counts is a signature over the
	// text that was sent.
	text, _, _ := strings.Cut(string(signed), "\n\n")
	n, err := note.Open(append(slices.Clone(signed), answer...), note.VerifierList(w.key))
	if err != nil || len(n.Sigs) == 0 || n.Text != text+"\n" {
		return bad(errors.Join(errors.New("its cosignature does not verify by the key of the policy"), err))
	}
	var lines []byte
	for _, s := range n.Sigs {
		lines = fmt.Appendf(lines, "— %s %s\n", s.Name, s.Base64)
	}
	return lines, nil
}

// askFirst asks each witness for the head that it knows, before the owner appends. A
// store whose whole directory was put back is consistent in itself: only witnesses know.
// So is a fork that has grown beyond the witnessed size: the log must continue what each
// witness has cosigned.
func (k *Keeper) askFirst(ctx context.Context) (err error) {
	ws := k.witnesses
	defer func() {
		if err != nil {
			ws.close()
		}
	}()
	if len(ws.list) == 0 {
		return nil
	}
	h, signed, err := k.present()
	if errors.Is(err, ErrDamaged) {
		return err
	}
	if err != nil {
		if !k.config.Optional {
			return problem.Errorf(problem.Unavailable, "the witnesses cannot be asked, so this store may be an older state of itself: %w", err)
		}
		k.o.Logger.Warn("audit: witnesses not asked; an older state of this store would not be noticed", "error", err)
		return nil
	}
	var damage, unheard []error
	ws.ask(ctx, ws.list, func(ctx context.Context, w *witnessed) ([]byte, error) { return k.askOne(ctx, w, h, signed) }, func(a answer) (enough bool) {
		switch {
		case errors.Is(a.err, ErrRolledBack), errors.Is(a.err, ErrDamaged):
			damage = append(damage, a.err)
		case a.err != nil && len(damage) == 0:
			unheard = append(unheard, a.err)
			a.after(a.err, time.Now())
		}
		return len(damage) > 0
	})
	switch {
	case len(damage) > 0:
		return damage[0]
	case ctx.Err() != nil:
		return ctx.Err()
	case len(unheard) == 0:
	case len(unheard) < len(ws.list):
		k.o.Logger.Warn("audit: not all witnesses answer; a head that only the others know would not be noticed", "error", errors.Join(unheard...))
	case !k.config.Optional:
		return problem.Errorf(problem.Unavailable, "no witness answers, so this store may be an older state of itself: %w: try again when one answers; `ckptstore audit configure --optional` lets the store open meanwhile", errors.Join(unheard...))
	default:
		k.o.Logger.Warn("audit: no witness answers; an older state of this store would not be noticed", "error", errors.Join(unheard...))
	}
	return nil
}

// askOne asks a witness for the head that it knows, and has it check that this log
// continues that head.
func (k *Keeper) askOne(ctx context.Context, w *witnessed, h audit.Head, signed []byte) ([]byte, error) {
	lines, err := w.post(ctx, 0, nil, signed)
	var knows *knowsError
	if !errors.As(err, &knows) {
		if err == nil {
			w.size = h.Size
		}
		return lines, err
	}
	if knows.size == 0 {
		return nil, err
	}
	w.size = knows.size
	switch {
	case w.size > k.head.Size:
		return nil, k.rolledBack(w, k.head)
	case w.size > h.Size:
		// The witness knows a head that was listed and not published. Without the key there
		// is no note of a later head to show, so only the sizes are compared.
		return nil, nil
	}
	return k.cosign(ctx, w, h, signed)
}

// present returns a signed note of the newest head or, without the key, of the published
// one.
func (k *Keeper) present() (audit.Head, []byte, error) {
	if k.signer == nil {
		signed, h, err := k.Checkpoint()
		if errors.Is(err, ErrOff) {
			err = errors.New("no head was published yet, and this process cannot read the signing key: open the store once where it can be read")
		}
		return h, signed, err
	}
	h := k.head
	if h.Size == 0 {
		h = emptyHead(h.Origin)
	}
	if h.Size > k.anchor.Size { // an earlier owner listed it, and died or had no key
		if err := k.keepAnchor(h); err != nil {
			return h, nil, err
		}
	}
	signed, err := audit.Sign(h, k.signer)
	return h, signed, err
}

// emptyHead returns the head of a log without entries.
func emptyHead(origin string) audit.Head {
	return audit.Head{Origin: origin, Root: emptyRoot}
}

// witness collects cosignatures of a head, from all witnesses at once, until there are
// enough for the policy. Its error matches [audit.ErrPolicy] where there are not: the head
// is not published then. It matches [ErrDamaged] also where a witness has cosigned a head
// that this log does not continue.
func (k *Keeper) witness(ctx context.Context, h audit.Head, signed []byte) ([]byte, error) {
	ws := k.witnesses
	if len(ws.list) == 0 {
		return signed, nil
	}
	log, err := note.NewVerifier(k.config.Key)
	if err != nil {
		return nil, fmt.Errorf("%w: the verifier key: %w", ErrDamaged, err)
	}
	out, satisfied := slices.Clone(signed), ws.policy.Unwitnessed()
	ws.ask(ctx, ws.awake(), func(ctx context.Context, w *witnessed) ([]byte, error) { return k.cosign(ctx, w, h, signed) }, func(a answer) (enough bool) {
		if a.err == nil {
			out = append(out, a.lines...)
			satisfied = ws.policy.Witnesses.Satisfied(out)
		}
		if a.err == nil || ctx.Err() == nil && !errors.Is(a.err, context.Canceled) {
			k.rest(a)
		}
		return satisfied
	})
	if !satisfied {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("%w: head with %v lacks cosignatures: %w", audit.ErrPolicy, h, ws.failed())
	}
	if got, err := audit.OpenHead(out, log); err != nil || got != h {
		return nil, fmt.Errorf("the cosigned note is not of the head with %v: %w", h, errors.Join(err, ErrDamaged))
	}
	return out, nil
}

// cosign asks one witness, twice if it knows another size than was believed.
func (k *Keeper) cosign(ctx context.Context, w *witnessed, h audit.Head, signed []byte) ([]byte, error) {
	for again := false; ; again = true {
		var proof tlog.TreeProof
		if w.size > h.Size {
			return nil, k.rolledBack(w, h)
		}
		if w.size > 0 && w.size < h.Size {
			var err error
			if proof, err = tlog.ProveTree(h.Size, w.size, k.hashes(ctx, h)); err != nil {
				return nil, tampered(err)
			}
		}
		lines, err := w.post(ctx, w.size, proof, signed)
		var knows *knowsError
		var refused *refusedError
		switch {
		case errors.As(err, &knows) && !again && knows.size != w.size:
			w.size = knows.size
			continue
		case errors.As(err, &refused) && refused.forks(w.size, h.Size):
			return nil, k.forked(ctx, w, h, refused)
		case err == nil:
			w.size = h.Size
		}
		return lines, err
	}
}

func (k *Keeper) rolledBack(w *witnessed, h audit.Head) error {
	return fmt.Errorf("%w: the witness %s knows a head of size %d, and this store has %v: its directory was replaced by an older state, or another copy of the store was continued: put the newest state back; if that is lost, such as to continue a restored backup, begin a new origin: `ckptstore audit keygen FILE --new-origin`",
		ErrRolledBack, w.url, w.size, h)
}

// forked returns the error of a log that does not continue the head that a witness knows.
func (k *Keeper) forked(ctx context.Context, w *witnessed, h audit.Head, refused *refusedError) error {
	root := h.Root
	if w.size < h.Size {
		var err error
		if root, err = tlog.TreeHash(w.size, k.hashes(ctx, h)); err != nil {
			return errors.Join(refused, tampered(err))
		}
	}
	return fmt.Errorf("%w: the witness %s has cosigned another log of size %d than this one, whose root is %s there: the log was rewritten, or another copy of the store was continued: restore log/ and audit/ from the copy whose root the witness has; both roots are the evidence: %w",
		ErrDamaged, w.url, w.size, root, refused)
}
