package front

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"strings"
)

// Principal is who a client is, in the owner's words:
//
//	token        it has shown the token, which several may have
//	cert:alice   it has shown a certificate of this name
//	uid:1000     it is a process of this user
type Principal struct {
	Name string
	// Personal says that all who have the name are one person, so that what one
	// session of it holds, another may take.
	Personal bool
}

var byToken = Principal{Name: "token"}

// OfUser is the principal of a process of this machine.
func OfUser(uid uint32) Principal {
	return Principal{Name: fmt.Sprintf("uid:%d", uid), Personal: true}
}

// principalName is the longest name of a certificate that is used as it is.
const principalName = 64

// ofCertificate is the principal of a verified certificate: its common name, or
// without one its first alternative name. One that a header cannot hold in a
// short form is called by its digest.
func ofCertificate(c *x509.Certificate) Principal {
	names := []string{c.Subject.CommonName}
	names = append(names, c.DNSNames...)
	names = append(names, c.EmailAddresses...)
	for _, u := range c.URIs {
		names = append(names, u.String())
	}
	name := ""
	for _, n := range names {
		if n != "" {
			name = n
			break
		}
	}
	plain := name != "" && len(name) <= principalName && name == strings.TrimSpace(name) && !strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r > '~' })
	if !plain || strings.HasPrefix(name, "sha256:") {
		sum := sha256.Sum256(c.Raw)
		name = "sha256:" + hex.EncodeToString(sum[:16])
	}
	return Principal{Name: "cert:" + name, Personal: true}
}

// ofTLS is the principal of the certificate that a client has shown, if it was
// verified.
func ofTLS(state tls.ConnectionState) (Principal, bool) {
	if len(state.VerifiedChains) == 0 {
		return Principal{}, false
	}
	return ofCertificate(state.VerifiedChains[0][0]), true
}
