package ledger

import (
	"errors"
	"net/http"
	"reflect"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/audit"
)

// Handler returns a server of the log in the form of C2SP tlog-tiles, for mirrors and
// other people's verifiers. It reports errors to the caller: a client is not shown names of
// files of the machine. Report must not block.
func (b *Book) Handler(report func(error)) http.Handler {
	return &tileServer{b, report}
}

// Tiles opens the ledger of a store, and keeps it open while its configuration is the same:
// the salts of a long log with many runs are then not read for each request. The zero value
// is ready for use. It may be used concurrently.
type Tiles struct {
	mu   sync.Mutex
	book *Book
}

// Open is [OpenBook], except that it returns the book that it has opened before where the
// log and the configuration are the same.
func (t *Tiles) Open(store string, log Log) (*Book, error) {
	c, err := ReadConfig(store)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.book != nil && t.book.store == store && t.book.log == log && reflect.DeepEqual(t.book.config, c) {
		return t.book, nil
	}
	t.book, err = OpenBook(store, log)
	return t.book, err
}

type tileServer struct {
	b      *Book
	report func(error)
}

// ServeHTTP implements [http.Handler].
func (s *tileServer) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		rw.Header().Set("Allow", "GET, HEAD")
		http.Error(rw, "want GET", http.StatusMethodNotAllowed)
		return
	}
	signed, h, err := s.b.Checkpoint()
	if errors.Is(err, ErrOff) {
		http.Error(rw, "no head was published yet", http.StatusNotFound)
		return
	}
	if err != nil {
		s.fail(rw, r, err)
		return
	}
	path := strings.TrimPrefix(r.URL.Path, "/")
	if path == checkpointName {
		rw.Header().Set("Content-Type", "text/plain; charset=utf-8")
		rw.Header().Set("Cache-Control", "no-cache")
		_, _ = rw.Write(signed)
		return
	}
	level, n, width, err := audit.ParseTilePath(path)
	if err != nil {
		http.NotFound(rw, r)
		return
	}
	has := h.Size // hashes of the level, or entries, under the head
	if level > 0 {
		has >>= audit.TileHeight * level
	}
	if n*audit.TileWidth+int64(width) > has {
		http.NotFound(rw, r)
		return
	}
	data, err := s.data(r, level, n, width)
	if err != nil {
		s.fail(rw, r, err)
		return
	}
	rw.Header().Set("Content-Type", "application/octet-stream")
	rw.Header().Set("Cache-Control", "max-age=31536000, immutable")
	_, _ = rw.Write(data)
}

// data returns a tile, or a bundle of entries.
func (s *tileServer) data(r *http.Request, level int, n int64, width int) (data []byte, err error) {
	if level != audit.Entries {
		return s.b.tile(r.Context(), level, n, width)
	}
	list, err := s.b.entries(r.Context(), n, width)
	for _, e := range list {
		data = audit.AppendBundle(data, e)
	}
	return data, err
}

// fail answers with a status, and reports the error here. A client that left is no error.
func (s *tileServer) fail(rw http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() == nil {
		s.report(err)
	}
	http.Error(rw, "the log cannot be read; its operator can see why", http.StatusInternalServerError)
}
