package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	fnote "github.com/transparency-dev/formats/note"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Witness cosigns heads of logs that continue those it has cosigned before. It
// implements C2SP tlog-witness. Run it where the owners of the logs cannot change its
// files.
type Witness struct {
	dir    string
	logs   map[string]note.Verifier // by origin
	signer *fnote.Signer
	lock   *os.File
	report func(error)

	mu sync.Mutex // one head at a time
}

// NewWitness returns a witness that keeps the newest head of each log in dir, signs with
// the key in a file, and knows the logs by their verifier keys. Only one process at a time
// uses a directory: two could cosign two histories. Report is called with each new fork of
// a log; it must not block.
func NewWitness(dir, keyFile string, logs []string, report func(error)) (*Witness, error) {
	w := &Witness{dir: dir, logs: map[string]note.Verifier{}, report: report}
	text, err := ReadKey(keyFile)
	if err == nil {
		w.signer, err = fnote.NewSignerForCosignatureV1(text)
	}
	if err != nil {
		return nil, fmt.Errorf("witness: key %s: %w", keyFile, err)
	}
	for _, key := range logs {
		v, err := note.NewVerifier(key)
		if err != nil {
			return nil, fmt.Errorf("witness: %w", problem.Errorf(problem.Invalid, "log %s: %w", key, err))
		}
		if w.logs[v.Name()] != nil {
			return nil, fmt.Errorf("witness: %w", problem.Errorf(problem.Invalid, "two keys of the log %s: name one: its heads are kept by the log's name", v.Name()))
		}
		w.logs[v.Name()] = v
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("witness: %w", err)
	}
	if w.lock, err = os.OpenFile(filepath.Join(dir, "LOCK"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, fmt.Errorf("witness: %w", err)
	}
	if err := unix.Flock(int(w.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		err = errors.Join(err, w.lock.Close())
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = problem.Errorf(problem.Locked, "another witness uses %s: end it, or choose another directory", dir)
		}
		return nil, fmt.Errorf("witness: %w", err)
	}
	return w, nil
}

// Close releases the directory.
func (w *Witness) Close() error { return w.lock.Close() }

// ServeHTTP implements [http.Handler].
func (w *Witness) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/add-checkpoint" {
		http.NotFound(rw, r)
		return
	}
	if r.Method != http.MethodPost {
		http.Error(rw, "want POST", http.StatusMethodNotAllowed)
		return
	}
	body, err := httpkit.Read(rw, r, answerMost)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	lines, status, err := w.add(body)
	var knows *knowsError
	switch {
	case errors.As(err, &knows):
		rw.Header().Set("Content-Type", sizeType)
		rw.WriteHeader(http.StatusConflict)
		_, _ = fmt.Fprintf(rw, "%d\n", knows.size)
	case status == http.StatusInternalServerError:
		http.Error(rw, "the witness cannot use its directory: "+cause(err).Error(), status)
	case err != nil:
		http.Error(rw, err.Error(), status)
	default:
		_, _ = rw.Write(lines)
	}
}

// cause returns an error without the names of files.
func cause(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		return path.Err
	case errors.As(err, &link):
		return link.Err
	}
	return err
}

// add decides about one request. Of a refusal it returns the status.
func (w *Witness) add(body []byte) (lines []byte, status int, err error) {
	old, proof, signed, err := parseAdd(body)
	if err != nil {
		return nil, http.StatusBadRequest, err
	}
	origin, _, _ := strings.Cut(string(signed), "\n")
	log := w.logs[origin]
	if log == nil {
		return nil, http.StatusNotFound, fmt.Errorf("unknown log %q", origin)
	}
	h, err := audit.OpenHead(signed, log)
	if err != nil {
		return nil, http.StatusForbidden, err
	}
	if old > h.Size {
		return nil, http.StatusBadRequest, fmt.Errorf("old size %d is beyond the head's %d", old, h.Size)
	}
	if h.Size == 0 && h.Root != emptyRoot {
		return nil, http.StatusUnprocessableEntity, errors.New("a log without entries has another root")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	sum := sha256.Sum256([]byte(origin))
	path := filepath.Join(w.dir, hex.EncodeToString(sum[:]))
	known := audit.Head{Origin: origin}
	text, err := os.ReadFile(path)
	switch {
	case err == nil:
		if known, err = audit.OpenHead(text, log); err != nil {
			return nil, http.StatusInternalServerError, err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, http.StatusInternalServerError, err
	}
	switch {
	case old != known.Size:
		return nil, 0, &knowsError{size: known.Size}
	case h.Size == known.Size && known.Size > 0 && h.Root != known.Root:
		fork := &audit.ForkError{Old: known, New: h}
		file := path + ".fork"
		if fresh, err := keepFork(file, text, signed, h); err != nil {
			w.report(fmt.Errorf("log %s: %w: both notes are the evidence, and cannot be kept in %s: %w", origin, fork, file, err))
		} else if fresh {
			w.report(fmt.Errorf("log %s: %w: both notes are the evidence: %s", origin, fork, file))
		}
		return nil, http.StatusConflict, fork
	case h.Size == known.Size, known.Size == 0:
		if len(proof) > 0 {
			return nil, http.StatusUnprocessableEntity, errors.New("a proof where none is needed")
		}
	default:
		if err := tlog.CheckTree(proof, h.Size, h.Root, known.Size, known.Root); err != nil {
			return nil, http.StatusUnprocessableEntity, fmt.Errorf("the proof does not show that the log continues size %d: %w", known.Size, err)
		}
	}
	if h.Size != known.Size {
		if err := durable.Write(path, signed); err != nil {
			return nil, http.StatusInternalServerError, err
		}
	}
	cosigned, err := note.Sign(&note.Note{Text: h.Text()}, w.signer)
	if err != nil {
		return nil, http.StatusInternalServerError, err
	}
	_, lines, _ = bytes.Cut(cosigned, []byte("\n\n"))
	return lines, 0, nil
}

// forksMost bounds the evidence about one log, whose owner chooses how many forks it signs.
const forksMost = 1 << 20

// keepFork appends the two notes that show a fork of a log to a file, unless it has that of
// the new head h. It reports whether it appended them.
func keepFork(path string, known, signed []byte, h audit.Head) (fresh bool, err error) {
	had, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if bytes.Contains(had, []byte(h.Text()+"\n")) {
		return false, nil
	}
	if len(had) > 0 {
		had = append(had, '\n')
	}
	had = append(append(append(had, known...), '\n'), signed...)
	if len(had) > forksMost {
		return false, fmt.Errorf("it would have more than %d bytes: move it away", forksMost)
	}
	return true, durable.Write(path, had)
}

// parseAdd parses the body of add-checkpoint.
func parseAdd(body []byte) (old int64, proof tlog.TreeProof, signed []byte, err error) {
	head, signed, ok := bytes.Cut(body, []byte("\n\n"))
	lines := strings.Split(string(head), "\n")
	number, ok2 := strings.CutPrefix(lines[0], "old ")
	if !ok || !ok2 {
		return 0, nil, nil, errors.New("want `old SIZE`, a proof, an empty line and a note")
	}
	if old, err = strconv.ParseInt(number, 10, 64); err != nil || old < 0 || strconv.FormatInt(old, 10) != number {
		return 0, nil, nil, fmt.Errorf("%q is no size", number)
	}
	if len(lines) > 64 {
		return 0, nil, nil, errors.New("the proof has more than 63 hashes")
	}
	for _, line := range lines[1:] {
		h, err := base64.StdEncoding.DecodeString(line)
		if err != nil || len(h) != tlog.HashSize {
			return 0, nil, nil, fmt.Errorf("%q is no hash", line)
		}
		proof = append(proof, tlog.Hash(h))
	}
	return old, proof, signed, nil
}
