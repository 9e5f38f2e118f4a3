package store

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Environment of clients of a server. The token of a worker has another name:
// what a trainer gives its workers is good for its own socket alone.
const (
	EnvToken     = "CKPTSTORE_STORE_TOKEN"      // the token itself
	EnvTokenFile = "CKPTSTORE_STORE_TOKEN_FILE" // or a file of it
	EnvTLSCA     = "CKPTSTORE_TLS_CA"           // certificates by which the server is checked
	EnvTLSCert   = "CKPTSTORE_TLS_CERT"         // this client's certificate
	EnvTLSKey    = "CKPTSTORE_TLS_KEY"          // and its key
)

// ErrAccess says that a token, certificate or key cannot be used.
var ErrAccess = problem.New(problem.Invalid, "bad credentials")

// Access is what one side of a connection shows, and by what it checks the
// other. Certificates and keys are files in PEM.
type Access struct {
	Token     string // goes before TokenFile
	TokenFile string // readable for its user alone
	CA        string // of the other side's certificate; "" means the machine's, for a server: none
	Cert, Key string // both or neither
}

// AccessFromEnv is how this process connects to servers.
func AccessFromEnv() Access {
	return Access{
		Token: os.Getenv(EnvToken), TokenFile: os.Getenv(EnvTokenFile),
		CA: os.Getenv(EnvTLSCA), Cert: os.Getenv(EnvTLSCert), Key: os.Getenv(EnvTLSKey),
	}
}

// client fills in a client's side.
func (a Access) client(o *jetlog.Options) (err error) {
	if o.Token, err = a.token(); err != nil {
		return err
	}
	if a == (Access{Token: a.Token, TokenFile: a.TokenFile}) {
		return nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.RootCAs, err = pool(a.CA); err != nil {
		return err
	}
	if c.Certificates, err = a.pair(); err != nil {
		return err
	}
	o.TLS = c
	return nil
}

// Listen is a server's side: where and how it lets clients in. On loopback it
// may ask for nothing: then [Open] makes a token.
func (a Access) Listen(address string) (*jetlog.Listen, error) {
	l := &jetlog.Listen{Address: address}
	var err error
	if l.Token, err = a.token(); err != nil {
		return nil, err
	}
	certs, err := a.pair()
	switch {
	case err != nil:
		return nil, err
	case certs != nil:
		l.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: certs}
	case a.CA != "":
		return nil, fmt.Errorf("%w: a CA for client certificates needs a certificate and key of the server too", ErrAccess)
	}
	if a.CA != "" {
		if l.TLS.ClientCAs, err = pool(a.CA); err != nil {
			return nil, err
		}
		l.TLS.ClientAuth = tls.RequireAndVerifyClientCert
	}
	with, _ := withToken(*l) // as the owner does
	return l, with.Validate()
}

func (a Access) token() (string, error) {
	token := []byte(a.Token)
	if a.Token == "" && a.TokenFile != "" {
		text, err := secret("token", a.TokenFile)
		if err != nil {
			return "", err
		}
		if token = bytes.TrimSpace(text); len(token) == 0 {
			return "", fmt.Errorf("%w: token file %s is empty: `openssl rand -hex 32` makes a token", ErrAccess, a.TokenFile)
		}
	}
	for _, c := range token {
		if c <= ' ' || c > '~' {
			return "", fmt.Errorf("%w: the token has a space, a line break or a character that is not ASCII: `openssl rand -hex 32` makes a good one", ErrAccess)
		}
	}
	return string(token), nil
}

// secret reads a file that nobody else may read.
func secret(what, path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAccess, what, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAccess, what, err)
	}
	const most = 1 << 20
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, fmt.Errorf("%w: %s %s is not a file of at most %d bytes", ErrAccess, what, path, most)
	}
	next := fmt.Sprintf("chmod 600 %s, and make a new %s if another user may have read it", path, what)
	if err := private.Secret(path, info, next); err != nil {
		return nil, fmt.Errorf("%w: %s file %w", ErrAccess, what, err)
	}
	text := make([]byte, info.Size())
	if _, err := f.ReadAt(text, 0); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAccess, what, err)
	}
	return text, nil
}

// pair is the certificate and its key, nil without them.
func (a Access) pair() ([]tls.Certificate, error) {
	switch {
	case a.Cert == "" && a.Key == "":
		return nil, nil
	case a.Cert == "" || a.Key == "":
		return nil, fmt.Errorf("%w: a certificate needs its key, and a key its certificate: give both", ErrAccess)
	}
	cert, err := os.ReadFile(a.Cert)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate: %w", ErrAccess, err)
	}
	key, err := secret("key", a.Key)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate %s with key %s: %w", ErrAccess, a.Cert, a.Key, err)
	}
	return []tls.Certificate{pair}, nil
}

// pool is the certificates in a file, nil without one.
func pool(path string) (*x509.CertPool, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: CA: %w", ErrAccess, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%w: CA %s has no certificate in PEM", ErrAccess, path)
	}
	return pool, nil
}
