package nodes

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/share"
)

// credentials is DIR/JOB.json: what an agent needs to trust the endpoint and to be
// trusted by it. Only the user of the job can read the file.
type credentials struct {
	Address     string `json:"address"`
	Token       string `json:"token"`
	Certificate string `json:"certificate"` // SHA-256 of its DER form, in hexadecimal
}

// maxCredentials is the largest file that an agent reads.
const maxCredentials = 64 << 10

// jobName is the form of a job's ID, which names its file.
var jobName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

func credentialsPath(dir, job string) string { return filepath.Join(dir, job+".json") }

// write writes the file of a job.
func (c credentials) write(dir, job string) error { return writeSecret(dir, job, c) }

// writeSecret writes DIR/NAME.json durably, with all its bytes or not at all. Its mode is
// 0600 in a group's directory too: its content is this user's.
func writeSecret(dir, name string, content any) error {
	if err := share.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, durable.TempPrefix+rand.Text())
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, credentialsPath(dir, name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return durable.SyncDir(dir)
}

// readCredentials reads the file of a job. The job's name comes from an endpoint that is
// not trusted yet.
func readCredentials(dir, job string) (c credentials, err error) {
	if !jobName.MatchString(job) {
		return c, problem.Errorf(problem.Invalid, "the endpoint has the malformed job ID %q; check the address of the endpoint", job)
	}
	data, err := readSecret(dir, job)
	if err != nil {
		return c, err
	}
	if err = json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("read %s: %w", credentialsPath(dir, job), err)
	}
	return c, nil
}

// readSecret reads a file that the same user has written on another machine.
func readSecret(dir, name string) ([]byte, error) {
	path := credentialsPath(dir, name)
	f, err := beneath.At(dir).Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err == nil {
		err = private.File(path, info, "run all agents as the user of the coordinator")
	}
	var data []byte
	if err == nil {
		data, err = io.ReadAll(io.LimitReader(f, maxCredentials))
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return data, nil
}

// look makes a name visible that another node has made: listing a directory asks its
// server, while a lookup may be answered from a cache of absent names.
func look(dir string) {
	if d, err := os.Open(dir); err == nil {
		_, _ = d.Readdirnames(-1)
		_ = d.Close()
	}
}

func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// newCertificate makes a certificate for one job. Its dates allow for clocks that
// differ: agents compare the digest only.
func newCertificate(now time.Time) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ckptstore job"},
		NotBefore: now.AddDate(-1, 0, 0), NotAfter: now.AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

func digest(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// proof shows that its maker holds the token, without showing the token. It covers the
// certificate, so that no program between both ends can forward it.
func proof(token, nonce, certificate string) string {
	mac := hmac.New(sha256.New, []byte(token))
	fmt.Fprintf(mac, "ckptstore endpoint\x00%s\x00%s", nonce, certificate)
	return hex.EncodeToString(mac.Sum(nil))
}

func same(a, b string) bool { return a != "" && hmac.Equal([]byte(a), []byte(b)) }
