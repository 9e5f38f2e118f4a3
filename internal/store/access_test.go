package store

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// TestAccess reads tokens, certificates and keys.
func TestAccess(t *testing.T) {
	t.Parallel()
	certs := certificates(t)
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("token", secretToken+"\n", 0o600)
	key := file("key", read(t, certs["server.key"]), 0o644)
	const local, far = "127.0.0.1:0", "0.0.0.0:0"
	for name, tc := range map[string]struct {
		access  Access
		address string
		is      error // nil for what is good
		says    string
	}{
		"a file":             {Access{TokenFile: good}, local, nil, ""},
		"the environment":    {Access{Token: secretToken, TokenFile: "/nowhere"}, local, nil, ""},
		"TLS and token":      {Access{TokenFile: good, Cert: certs["server.pem"], Key: certs["server.key"]}, far, nil, ""},
		"mutual TLS":         {Access{CA: certs["ca.pem"], Cert: certs["server.pem"], Key: certs["server.key"]}, far, nil, ""},
		"group readable":     {Access{TokenFile: file("group", secretToken, 0o640)}, local, ErrAccess, "chmod 600"},
		"world readable":     {Access{TokenFile: file("world", secretToken, 0o604)}, local, ErrAccess, "chmod 600"},
		"group writable":     {Access{TokenFile: file("writable", secretToken, 0o620)}, local, ErrAccess, "chmod 600"},
		"no file":            {Access{TokenFile: filepath.Join(dir, "none")}, local, os.ErrNotExist, "none"},
		"a directory":        {Access{TokenFile: dir}, local, ErrAccess, "not a file"},
		"an empty file":      {Access{TokenFile: file("empty", "\n", 0o600)}, local, ErrAccess, "openssl"},
		"two lines":          {Access{TokenFile: file("two", secretToken+"\n"+secretToken, 0o600)}, local, ErrAccess, "line break"},
		"a short token":      {Access{Token: "short"}, local, jetlog.ErrExposed, "openssl"},
		"key readable":       {Access{Cert: certs["server.pem"], Key: key}, local, ErrAccess, "chmod 600"},
		"no key":             {Access{Cert: certs["server.pem"]}, local, ErrAccess, "give both"},
		"key of another":     {Access{Cert: certs["server.pem"], Key: certs["ca.key"]}, local, ErrAccess, "server.pem"},
		"no PEM":             {Access{CA: good, Cert: certs["server.pem"], Key: certs["server.key"]}, local, ErrAccess, "PEM"},
		"CA alone":           {Access{CA: certs["ca.pem"]}, local, ErrAccess, "certificate and key"},
		"far without TLS":    {Access{TokenFile: good}, far, jetlog.ErrExposed, "in clear"},
		"far without secret": {Access{Cert: certs["server.pem"], Key: certs["server.key"]}, far, jetlog.ErrExposed, "token"},
	} {
		l, err := tc.access.Listen(tc.address)
		if tc.is == nil {
			if err != nil || l.Token != "" && l.Token != secretToken {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		wrong(t, err, tc.is, tc.says)
		if err != nil && strings.Contains(err.Error(), secretToken) {
			t.Errorf("%s: %v contains the token", name, err)
		}
	}
}

// TestAccessFromEnv: clients are configured by the environment.
func TestAccessFromEnv(t *testing.T) {
	_, addr := listening(t, made(t), &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken})
	refused(t, Options{Location: "nats://" + addr}, jetlog.ErrNotAllowed)
	t.Setenv(EnvToken, secretToken)
	shut(t, openWith(t, Options{Location: "nats://" + addr}))
	path := filepath.Join(t.TempDir(), "token")
	write(t, path, secretToken+"\n")
	t.Setenv(EnvToken, "")
	t.Setenv(EnvTokenFile, path)
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: "nats://" + addr}, ErrAccess, "chmod 600")
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	shut(t, openWith(t, Options{Location: "nats://" + addr}))
}

// certificates are the paths of a CA and of a certificate that it has signed.
func certificates(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	paths := map[string]string{}
	save := func(name, kind string, der []byte) {
		t.Helper()
		paths[name] = filepath.Join(dir, name)
		if err := os.WriteFile(paths[name], pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var ca *x509.Certificate
	var caKey *ecdsa.PrivateKey
	for i, name := range []string{"ca", "server"} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		cert := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: fmt.Sprint("test ", name)},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: ca == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		}
		if ca == nil {
			ca, caKey = cert, key
		}
		der, err := x509.CreateCertificate(rand.Reader, cert, ca, &key.PublicKey, caKey)
		if err != nil {
			t.Fatal(err)
		}
		secretKey, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		save(name+".pem", "CERTIFICATE", der)
		save(name+".key", "EC PRIVATE KEY", secretKey)
	}
	return paths
}
