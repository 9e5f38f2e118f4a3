package container

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Without the variable, the file of a pod is written in Kubernetes only, and need not exist.
func TestCauseOfPod(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "termination-log")
	for _, c := range []struct{ service, want string }{{"", ""}, {"10.96.0.1", "why"}} {
		getenv := func(name string) string { return map[string]string{EnvService: c.service}[name] }
		if err := leaveCause(getenv, file+".absent", "why", ""); err != nil {
			t.Errorf("in %q without the file: %v", c.service, err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := leaveCause(getenv, file, "why", ""); err != nil {
			t.Error(err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != c.want {
			t.Errorf("in %q: the file has %q (%v), want %q", c.service, got, err, c.want)
		}
	}
}

// foreignAuthority returns the certificate of an authority that has signed nothing.
func foreignAuthority(t *testing.T) string {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	made := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, NotAfter: time.Now().Add(time.Hour)}
	certificate, err := x509.CreateCertificate(rand.Reader, made, made, public, private)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}))
}

// An annotation is a merge patch of the pod, with the credentials that the pod has at that
// time.
func TestAnnotate(t *testing.T) {
	t.Parallel()
	type request struct{ method, path, kind, token, body string }
	var got request
	status := http.StatusOK
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = request{r.Method, r.URL.Path, r.Header.Get("Content-Type"), r.Header.Get("Authorization"), string(body)}
		w.WriteHeader(status)
		fmt.Fprint(w, `{"message": "not today"}`)
	}))
	defer server.Close()
	host, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	env := map[string]string{EnvService: host, "KUBERNETES_SERVICE_PORT": port}
	getenv := func(name string) string { return env[name] }
	if _, err := podOf("bert-0", dir, getenv); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a pod without an account: %v", err)
	}
	write("namespace", "team\n")
	pod, err := podOf("bert-0", dir, getenv)
	if err != nil {
		t.Fatal(err)
	}
	want := request{"PATCH", "/api/v1/namespaces/team/pods/bert-0", "application/merge-patch+json", "", ""}
	for _, token := range []string{"first", "second"} {
		write("token", token+"\n")
		write("ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
		if err := pod.Annotate(t.Context(), map[string]string{"a/b": "c"}); err != nil {
			t.Fatal(err)
		}
		var body any
		if err := json.Unmarshal([]byte(got.body), &body); err != nil || fmt.Sprint(body) != "map[metadata:map[annotations:map[a/b:c]]]" {
			t.Errorf("body %s: %v", got.body, err)
		}
		want.token, want.body = "Bearer "+token, got.body
		if got != want {
			t.Errorf("request %v, want %v", got, want)
		}
	}
	status = http.StatusForbidden
	if err := pod.Annotate(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "annotate pod bert-0: the API server answers 403 Forbidden: not today; ") {
		t.Errorf("refused: %v", err)
	}
	// A server without a certificate of the cluster's authority does not get the token.
	got = request{}
	write("ca.crt", "no certificate")
	if err := pod.Annotate(t.Context(), nil); err == nil || got.token != "" {
		t.Errorf("without an authority: %v, %v", err, got)
	}
	write("ca.crt", foreignAuthority(t))
	if err := pod.Annotate(t.Context(), nil); err == nil || got.token != "" || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("with another authority: %v, %v", err, got)
	}
	delete(env, EnvService)
	if _, err := podOf("bert-0", dir, getenv); err == nil || !strings.Contains(err.Error(), "no pod") {
		t.Errorf("outside of Kubernetes: %v", err)
	}
}
