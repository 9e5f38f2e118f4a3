package s3

import (
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// TestUnknownCertificate reads from a server whose certificate no known authority signed, and
// then with its authority in AWS_CA_BUNDLE. The server receives no request of the first.
func TestUnknownCertificate(t *testing.T) {
	var received atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		received.Add(1)
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte("<Error><Code>NoSuchKey</Code></Error>"))
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of the refused handshake
	server.StartTLS()
	defer server.Close()
	_, err := serverAt(t, server.URL).Get(t.Context(), "file", 10)
	var failed *Error
	if !errors.As(err, &failed) || failed.ProblemKind() != problem.Invalid || failed.Tries != 1 || !strings.Contains(err.Error(), "AWS_CA_BUNDLE") || received.Load() != 0 {
		t.Errorf("%v, after %d requests", err, received.Load())
	}
	bundle := filepath.Join(t.TempDir(), "authorities.pem")
	if err := os.WriteFile(bundle, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_CA_BUNDLE", bundle)
	if _, err := serverAt(t, server.URL).Get(t.Context(), "file", 10); !errors.Is(err, fs.ErrNotExist) || received.Load() != 1 {
		t.Errorf("with its authority: %v, after %d requests", err, received.Load())
	}
}
