package container

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// account is where Kubernetes keeps the credentials of a pod.
const account = "/var/run/secrets/kubernetes.io/serviceaccount"

// podTimeout bounds one request to the API server.
const podTimeout = 10 * time.Second

// maxAnswer is how much of an answer of the API server is read.
const maxAnswer = 64 << 10

// Pod is the pod of this process, at the API server of its cluster. Its service account
// needs the right to patch pods.
type Pod struct {
	name, url string
	account   string // directory of the credentials
}

// ThisPod returns the pod of this process, which has the given name: Kubernetes tells it to
// a container only where the manifest asks for it. It connects nowhere.
func ThisPod(name string, getenv func(string) string) (*Pod, error) {
	return podOf(name, account, getenv)
}

func podOf(name, account string, getenv func(string) string) (*Pod, error) {
	host, port := getenv(EnvService), getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("this is no pod of Kubernetes: KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set")
	}
	namespace, err := os.ReadFile(filepath.Join(account, "namespace"))
	if err != nil {
		return nil, fmt.Errorf("namespace of the pod: %w; set automountServiceAccountToken to true", err)
	}
	at := url.URL{Scheme: "https", Host: net.JoinHostPort(host, port)}
	return &Pod{name: name, url: at.JoinPath("api", "v1", "namespaces", strings.TrimSpace(string(namespace)), "pods", name).String(), account: account}, nil
}

// Annotate sets annotations of the pod; it may be repeated. It reads the credentials each
// time, because the kubelet replaces them, and returns within 10 s.
func (p *Pod) Annotate(ctx context.Context, annotations map[string]string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("annotate pod %s: %w", p.name, err)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	token, err := os.ReadFile(filepath.Join(p.account, "token"))
	if err != nil {
		return err
	}
	authority, err := os.ReadFile(filepath.Join(p.account, "ca.crt"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return errors.New("ca.crt of the service account has no certificate")
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPatch, p.url, bytes.NewReader(patch))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/merge-patch+json")
	r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	// A new connection each time: there are minutes between two commits.
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	reply, err := transport.RoundTrip(r)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(io.LimitReader(reply.Body, maxAnswer))
	if err != nil {
		return err
	}
	if reply.StatusCode == http.StatusOK {
		return nil
	}
	var status struct {
		Message string `json:"message"`
	}
	_ = json.Unmarshal(text, &status) // the status tells enough without it
	return fmt.Errorf("the API server answers %s: %s; the service account of the pod needs the verb patch on pods", reply.Status, status.Message)
}
