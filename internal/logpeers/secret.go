package logpeers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// secret is STORE/join/log/secret.json. All peers have the same certificate. It is its own
// CA, so a peer or client that has the file trusts exactly those that have it too.
type secret struct {
	Token       string `json:"token"`
	Certificate string `json:"certificate"` // PEM
	Key         string `json:"key"`         // PEM
	Directory   uint64 `json:"directory"`   // inode of the directory that it was made in

	pair  tls.Certificate
	trust *x509.CertPool
}

// serverName is the name in the certificate: addresses of nodes change.
const serverName = "log.ckptstore"

func secretPath(store string) string { return filepath.Join(joinDir(store), "secret.json") }

// sharedSecret returns the secret of a store. The first caller makes it.
func sharedSecret(store string) (*secret, error) {
	s, err := readSecret(store)
	if !errors.Is(err, fs.ErrNotExist) {
		return s, err
	}
	if s, err = newSecret(time.Now()); err == nil {
		s.Directory, err = inode(joinDir(store))
	}
	if err != nil {
		return nil, fmt.Errorf("make the secret of the log's peers: %w", err)
	}
	text, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(joinDir(store), durable.TempPrefix+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		// Of two that link it, one succeeds, and both use that one's.
		if err = os.Link(f.Name(), secretPath(store)); errors.Is(err, fs.ErrExist) {
			err = nil
		}
	}
	if err = errors.Join(err, os.Remove(f.Name()), durable.SyncDir(joinDir(store))); err != nil {
		return nil, fmt.Errorf("make the secret of the log's peers: %w", err)
	}
	return readSecret(store)
}

// maxSecret is the largest file that is read.
const maxSecret = 64 << 10

func readSecret(store string) (*secret, error) {
	path := secretPath(store)
	f, err := beneath.At(store).Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err == nil {
		err = private.File(path, info, "run all trainers as one user")
	}
	var text []byte
	if err == nil {
		text, err = io.ReadAll(io.LimitReader(f, maxSecret))
	}
	s := &secret{}
	if err == nil {
		err = json.Unmarshal(text, s)
	}
	if err == nil {
		err = s.parse()
	}
	if err == nil {
		err = s.inPlace(store)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return s, nil
}

// ErrCopied reports a secret that was not made where it is.
var ErrCopied = problem.New(problem.Foreign, "the store was copied")

// inPlace returns [ErrCopied] for the secret of another directory. Its cards lead to the
// servers of that one's log, which would let this process in. A rename keeps the number of
// a directory, and all machines that share it see the same.
func (s *secret) inPlace(store string) error {
	dir := joinDir(store)
	number, err := inode(dir)
	if err != nil || number == s.Directory {
		return err
	}
	return fmt.Errorf("%w: it was made in directory number %d, and %s is number %d: its log may be in use there. "+
		"For a store of its own, with the checkpoints: remove %s and run `ckptstore recover --store %s`. "+
		"If the original is gone for good, as after a move to another filesystem: remove %s, and write %d in place of %d in secret.json",
		ErrCopied, s.Directory, dir, number, dir, store, filepath.Join(dir, "[0-2].json"), number, s.Directory)
}

func inode(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	return st.Ino, nil
}

// copy identifies a copy of the log of this secret.
func (s *secret) copy(index int) copyID {
	sum := sha256.Sum256([]byte("copy of the log\x00" + s.Token))
	return copyID{Log: hex.EncodeToString(sum[:16]), Index: index}
}

func (s *secret) parse() (err error) {
	if s.pair, err = tls.X509KeyPair([]byte(s.Certificate), []byte(s.Key)); err != nil {
		return err
	}
	s.trust = x509.NewCertPool()
	if !s.trust.AppendCertsFromPEM([]byte(s.Certificate)) || s.Token == "" {
		return errors.New("it has no certificate or no token")
	}
	return nil
}

// client returns how clients verify peers.
func (s *secret) client() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: s.trust, ServerName: serverName}
}

// server returns how peers verify clients: they show the token.
func (s *secret) server() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{s.pair}}
}

// route returns how peers verify each other: both show the certificate.
func (s *secret) route() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{s.pair}, ServerName: serverName,
		RootCAs: s.trust, ClientCAs: s.trust, ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

// newSecret makes a secret. The dates of its certificate allow for clocks that differ.
func newSecret(now time.Time) (*secret, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ckptstore log"}, DNSNames: []string{serverName},
		NotBefore: now.AddDate(-1, 0, 0), NotAfter: now.AddDate(50, 0, 0), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	text, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	s := &secret{
		Token:       rand.Text() + rand.Text(),
		Certificate: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		Key:         string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: text})),
	}
	return s, s.parse()
}
