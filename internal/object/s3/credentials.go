package s3

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/s3utils"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Keys sign requests.
type Keys struct {
	Access, Secret, Token string
	Expires               time.Time // zero: never
}

// Source returns the keys to use from now on. It is called again when they expire.
type Source func(context.Context) (Keys, error)

// Static returns keys that never change, for tests.
func Static(access, secret string) Source {
	return func(context.Context) (Keys, error) { return Keys{Access: access, Secret: secret}, nil }
}

// keyring holds the keys, and renews them. One goroutine at a time does, and no request waits
// for it beyond its own deadline: a program that prints credentials may hang.
type keyring struct {
	turn    chan struct{} // holds a value while one asks
	creds   *credentials.Credentials
	last    credentials.Value
	again   time.Time      // when keys that could not be renewed are asked for again
	clients []*http.Client // to close
}

func newKeys(at Location, source Source, pool *x509.CertPool) (*keyring, error) {
	k := &keyring{turn: make(chan struct{}, 1)}
	if source != nil {
		k.creds = credentials.New(&given{source: source})
		return k, nil
	}
	sources, err := k.chain(at, pool)
	if err != nil {
		return nil, err
	}
	k.creds = credentials.New(&chain{sources: sources})
	return k, nil
}

// get returns keys that have not expired.
func (k *keyring) get(ctx context.Context) (credentials.Value, error) {
	select {
	case k.turn <- struct{}{}:
	case <-ctx.Done():
		return credentials.Value{}, ctx.Err()
	}
	if now := time.Now(); now.Before(k.again) && now.Before(k.last.Expiration) {
		defer func() { <-k.turn }()
		return k.last, nil
	}
	if !k.creds.IsExpired() {
		defer func() { <-k.turn }()
		return k.creds.GetWithContext(&credentials.CredContext{Context: ctx})
	}
	type answer struct {
		value credentials.Value
		err   error
	}
	asked := make(chan answer, 1)
	asking := context.WithoutCancel(ctx) // other requests need the keys too
	go func() {
		defer func() { <-k.turn }()
		asking, cancel := context.WithTimeout(asking, time.Minute)
		defer cancel()
		value, err := k.creds.GetWithContext(&credentials.CredContext{Context: asking})
		switch {
		case err == nil:
			k.last = value
		case time.Now().Before(k.last.Expiration): // they are renewed before they expire
			k.again = time.Now().Add(renewTime)
			value, err = k.last, nil
		default:
			err = &keysError{err, k.last.AccessKeyID != ""}
		}
		asked <- answer{value, err}
	}()
	select {
	case a := <-asked:
		return a.value, a.err
	case <-ctx.Done():
		return credentials.Value{}, ctx.Err()
	}
}

// expire renews the keys at their next use, unless they were renewed since used was current.
func (k *keyring) expire(ctx context.Context, used credentials.Value) {
	if now, err := k.get(ctx); err == nil && now.AccessKeyID == used.AccessKeyID && now.SessionToken == used.SessionToken {
		k.creds.Expire()
	}
}

func (k *keyring) close() {
	for _, c := range k.clients {
		c.CloseIdleConnections()
	}
}

// renewTime is the wait after a failure to renew keys that are still valid.
const renewTime = 30 * time.Second

// keysError is the failure to find keys. It does not unwrap: a missing file of keys is no
// missing object.
type keysError struct {
	err error
	had bool // there were keys before: the failure may pass
}

func (e *keysError) Error() string {
	return fmt.Sprintf("no credentials: %v; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile (AWS_PROFILE, or profile= in the URL)", e.err)
}
func (e *keysError) ProblemKind() problem.Kind { return problem.Denied }

// given is a [Source] as a provider.
type given struct {
	credentials.Expiry
	source Source
	never  bool // they do not expire
}

func (g *given) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	ctx := context.Background()
	if cc != nil && cc.Context != nil {
		ctx = cc.Context
	}
	keys, err := g.source(ctx)
	if err != nil {
		return credentials.Value{}, err
	}
	if g.never = keys.Expires.IsZero(); !g.never {
		g.SetExpiration(keys.Expires, credentials.DefaultExpiryWindow)
	}
	return credentials.Value{AccessKeyID: keys.Access, SecretAccessKey: keys.Secret, SessionToken: keys.Token, Expiration: keys.Expires, SignerType: credentials.SignatureV4}, nil
}

func (g *given) Retrieve() (credentials.Value, error) { return g.RetrieveWithCredContext(nil) }
func (g *given) IsExpired() bool                      { return !g.never && g.Expiry.IsExpired() }

// provider is one source of the chain.
type provider struct {
	name string
	credentials.Provider
}

// chain asks sources in order. Unlike the client's own chain it reports why each has nothing,
// and never falls back to requests without a signature.
type chain struct {
	sources []provider
	current credentials.Provider
}

func (c *chain) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	var problems error
	for _, source := range c.sources {
		value, err := source.RetrieveWithCredContext(cc)
		if err == nil && value.AccessKeyID != "" && value.SecretAccessKey != "" {
			c.current = source
			return value, nil
		}
		problems = errors.Join(problems, fmt.Errorf("%s: %w", source.name, cmp.Or(err, errNoKeys)))
	}
	return credentials.Value{}, problems
}

func (c *chain) Retrieve() (credentials.Value, error) { return c.RetrieveWithCredContext(nil) }
func (c *chain) IsExpired() bool                      { return c.current == nil || c.current.IsExpired() }

var errNoKeys = errors.New("it has neither keys, nor sso_role_name, nor credential_process")

// chain returns the sources of keys, in the order of Amazon's own tools. A profile named in
// the URL is the only source: it was chosen on purpose.
func (k *keyring) chain(at Location, pool *x509.CertPool) ([]provider, error) {
	files := provider{"profile " + cmp.Or(at.Profile, os.Getenv("AWS_PROFILE"), "default"), &credentials.FileAWSCredentials{Profile: at.Profile}}
	if at.Profile != "" {
		return []provider{files}, nil
	}
	var sources []provider
	access, secret := os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY")
	switch {
	case access != "" && secret != "":
		return append(sources, provider{"environment", &credentials.EnvAWS{}}), nil
	case access != "" || secret != "":
		return nil, problem.Errorf(problem.Invalid, "credentials: of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY one is set; set both, or none")
	}
	sources = append(sources, files)
	role := &credentials.IAM{Client: k.httpClient(pool, 5*time.Second)}
	for _, name := range []string{"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"} {
		if os.Getenv(name) != "" {
			return append(sources, provider{"role of " + name, role}), nil
		}
	}
	if os.Getenv("AWS_EC2_METADATA_DISABLED") != "true" {
		role.Endpoint = os.Getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT")
		role.Client = k.httpClient(pool, time.Second) // its address is silent on other machines
		sources = append(sources, provider{"role of this machine", role})
	}
	return sources, nil
}

func (k *keyring) httpClient(pool *x509.CertPool, connect time.Duration) *http.Client {
	c := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: connect}).DialContext,
		TLSHandshakeTimeout: 5 * time.Second,
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool},
	}}
	k.clients = append(k.clients, c)
	return c
}

// regionOf returns the region that requests are signed for. Empty: the server has to be asked.
func regionOf(at Location) string {
	region := cmp.Or(at.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"))
	if u, err := url.Parse(at.Endpoint); region == "" && at.Endpoint != "" && err == nil {
		region = cmp.Or(s3utils.GetRegionFromURL(*u), "us-east-1")
	}
	return region
}

// authorities returns the system's certificate authorities and those of AWS_CA_BUNDLE; nil
// where it is not set. Package x509 itself respects SSL_CERT_FILE.
func authorities() (*x509.CertPool, error) {
	bundle := os.Getenv("AWS_CA_BUNDLE")
	if bundle == "" {
		return nil, nil
	}
	text, err := os.ReadFile(bundle)
	if err != nil {
		return nil, problem.Errorf(problem.Invalid, "AWS_CA_BUNDLE: %w", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, problem.Errorf(problem.Invalid, "AWS_CA_BUNDLE: %s holds no certificate in PEM", bundle)
	}
	return pool, nil
}
