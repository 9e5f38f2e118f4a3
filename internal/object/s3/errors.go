package s3

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	minio "github.com/minio/minio-go/v7"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// verdict is what a failed attempt means for the next.
type verdict int

const (
	final     verdict = iota // the next would fail too
	throttled                // the server asks for fewer requests, and has done nothing
	unclear                  // the server may have acted: its answer is lost, or it failed itself
	refused                  // a condition did not hold, or the upload is gone: perhaps by an earlier attempt
	expired                  // the keys have expired
)

// verdicts are the codes whose meaning the status does not tell.
var verdicts = map[string]verdict{
	"SlowDown": throttled, "SlowDownRead": throttled, "SlowDownWrite": throttled, "Throttling": throttled,
	"ThrottlingException": throttled, "RequestLimitExceeded": throttled, "RequestThrottled": throttled,
	"TooManyRequests": throttled, "ServiceUnavailable": throttled, "Busy": throttled,

	"InternalError": unclear, "RequestTimeout": unclear, "OperationAborted": unclear,

	"PreconditionFailed": refused, "ConditionalRequestConflict": refused, "NoSuchUpload": refused,
	"Conflict": refused,

	"ExpiredToken": expired, "ExpiredTokenException": expired, "TokenRefreshRequired": expired,
	"RequestExpired": expired,

	// A completion has these with the status of a success.
	"AccessDenied": final, "NoSuchBucket": final, "NoSuchKey": final, "InvalidAccessKeyId": final,
	"SignatureDoesNotMatch": final, "InvalidPart": final, "InvalidPartOrder": final,
	"EntityTooSmall": final, "EntityTooLarge": final, "InvalidRequest": final, "InvalidArgument": final,
	"NotImplemented": final, "MalformedXML": final,
}

// judge returns the verdict on a failed attempt.
func judge(err error, r request, c *call) verdict {
	var (
		answer minio.ErrorResponse
		keys   *keysError
		cert   *tls.CertificateVerificationError
		dns    *net.DNSError
	)
	switch {
	case errors.As(err, &answer):
		return judgeAnswer(answer, r, c)
	case errors.As(err, &keys):
		if keys.had {
			return unclear
		}
		return final
	case errors.As(err, &cert), errors.As(err, new(x509.UnknownAuthorityError)), errors.As(err, new(x509.HostnameError)),
		errors.As(err, new(x509.CertificateInvalidError)), errors.Is(err, object.ErrUnreadable), errors.Is(err, errPermanent),
		errors.Is(err, object.ErrTooLarge), errors.Is(err, object.ErrChanged), errors.Is(err, fs.ErrExist), errors.Is(err, fs.ErrNotExist),
		errors.As(err, &dns) && dns.IsNotFound && !dns.IsTemporary:
		return final
	case strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return final
	}
	return unclear
}

// errPermanent marks an answer that would be the same again.
var errPermanent = errors.New("the server does not do what it is asked")

func judgeAnswer(answer minio.ErrorResponse, r request, c *call) verdict {
	if v, ok := verdicts[answer.Code]; ok && !isMismatch(answer) {
		return v
	}
	switch {
	case isMismatch(answer):
		// The caller's memory has changed, or the bytes were damaged on the way.
		if r.runs != nil {
			if now, err := sum(r.runs); err == nil && now == r.sum {
				return unclear
			}
		}
		return final
	case full(answer) != nil:
		return final
	case c.class == classHead && answer.StatusCode == http.StatusBadRequest && c.used.SessionToken != "":
		return expired // an answer to HEAD has no body for the code
	}
	if c.status == http.StatusOK && answer.StatusCode != http.StatusOK {
		return final // the document names the failure, and the status is made up from it
	}
	switch answer.StatusCode {
	case http.StatusOK: // its document is cut off
		return unclear
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return throttled
	case http.StatusExpectationFailed: // the next attempt expects nothing
		return unclear
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusRequestTimeout, 499, 520, 521, 522, 523, 524:
		return unclear
	case http.StatusPreconditionFailed, http.StatusConflict:
		return refused
	}
	return final
}

// isMismatch reports whether an answer refuses bytes that differ from their checksum.
func isMismatch(answer minio.ErrorResponse) bool {
	switch answer.Code {
	case "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch":
		return true
	}
	text := strings.ToLower(answer.Message)
	return answer.StatusCode == http.StatusBadRequest && strings.Contains(text, "checksum") && strings.Contains(text, "match")
}

// full returns the system's error for an answer of a server that has no space.
func full(answer minio.ErrorResponse) error {
	switch {
	case strings.Contains(answer.Code, "Quota"):
		return syscall.EDQUOT
	case answer.Code == "XMinioStorageFull", answer.Code == "InsufficientStorage", answer.StatusCode == http.StatusInsufficientStorage:
		return syscall.ENOSPC
	}
	return nil
}

// Error is a request that failed.
type Error struct {
	Op      string // put, get, …
	URL     string // of the object, or the bucket
	Code    string // the server's; empty without an answer
	Status  int    // of HTTP; 0 without an answer
	Request string // the server's ID of the request
	Tries   int
	Hint    string // what to do
	Err     error

	kind  problem.Kind
	means error // a sentinel
}

// Error returns what failed, where, why and the next step.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s: ", e.Op, e.URL)
	if e.Code != "" {
		fmt.Fprintf(&b, "%s: ", e.Code)
	}
	b.WriteString(strings.TrimRight(e.Err.Error(), ". \n"))
	var notes []string
	if e.Status != 0 {
		notes = append(notes, fmt.Sprintf("status %d", e.Status))
	}
	if e.Request != "" {
		notes = append(notes, "request "+e.Request)
	}
	if e.Tries > 1 {
		notes = append(notes, fmt.Sprintf("%d tries", e.Tries))
	}
	if len(notes) > 0 {
		fmt.Fprintf(&b, " (%s)", strings.Join(notes, ", "))
	}
	if e.means != nil && !errors.Is(e.Err, e.means) {
		fmt.Fprintf(&b, ": %v", e.means)
	}
	if e.Hint != "" {
		fmt.Fprintf(&b, "; %s", e.Hint)
	}
	return b.String()
}

// Unwrap returns the cause, and the sentinel of package object or fs that it stands for.
func (e *Error) Unwrap() []error {
	if e.means == nil {
		return []error{e.Err}
	}
	return []error{e.means, e.Err}
}

// ProblemKind returns the kind, for exit codes and statuses.
func (e *Error) ProblemKind() problem.Kind { return e.kind }

// url returns the URL of a key.
func (b *Bucket) url(key string) string { return Location{Bucket: b.at.Bucket}.Path(key) }

// fail returns the error of a request.
func (b *Bucket) fail(r request, tries int, err error, c *call) error {
	e := &Error{Op: r.op, URL: b.url(r.key), Tries: tries, Err: err}
	var answer minio.ErrorResponse
	if errors.As(err, &answer) {
		e.Code, e.Status, e.Request = answer.Code, answer.StatusCode, answer.RequestID
		if c.status != 0 {
			e.Status = c.status
		}
		b.explain(e, r, answer)
		return e
	}
	if inner, whole := err.(*Error); whole { //nolint:errorlint // an error that wraps it has more to report
		return inner
	}
	b.explainLocal(e, err)
	return e
}

// explain adds what an answer means, and the next step. A status of 404 alone does not tell
// that the object is missing: versitygw has it for an unknown access key.
func (b *Bucket) explain(e *Error, r request, answer minio.ErrorResponse) {
	switch answer.Code {
	case "NoSuchKey", "NotFound", "NoSuchVersion":
		e.means = fs.ErrNotExist
	case "NoSuchBucket":
		e.kind, e.Hint = problem.Invalid, "create the bucket, or correct its name, endpoint and region"
	case "InvalidAccessKeyId", "XAdminUserNotFound":
		e.kind, e.Hint = problem.Denied, "the server does not know this access key: check AWS_ACCESS_KEY_ID or the profile, and that the endpoint is the right one"
	case "SignatureDoesNotMatch":
		e.kind, e.Hint = problem.Denied, "the secret key is not that of the access key: check AWS_SECRET_ACCESS_KEY or the profile"
	case "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken":
		e.kind, e.Hint = problem.Denied, "the session has expired: log in again, or use credentials that renew themselves (credential_process, a role)"
	case "AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden":
		e.kind, e.Hint = problem.Denied, "allow "+cmp.Or(r.needs, permission(r.class))+" on this bucket and prefix to the access key in use"
	case "AuthorizationHeaderMalformed", "PermanentRedirect", "InvalidRegion", "IllegalLocationConstraintException", "TemporaryRedirect", "IncorrectEndpoint":
		e.kind, e.Hint = problem.Invalid, "the bucket is in another region: "+regionHint(answer.Region)
	case "RequestTimeTooSkewed":
		e.kind, e.Hint = problem.Invalid, "the clock of this machine is wrong: set it by NTP"
	case "InvalidObjectState":
		e.kind, e.Hint = problem.Conflict, "the object is archived: restore it first, and exclude the prefix from transitions to archives"
	case "NoSuchUpload":
		e.kind, e.Hint = problem.Conflict, "another process, or a lifecycle rule for incomplete uploads, has removed the upload: save again"
	case "NotImplemented", "APINotSupported", "MethodNotAllowed":
		e.kind, e.Hint = problem.Invalid, "the server lacks this operation: use a server that has it"
	case "InvalidBucketName", "KMS.DisabledException", "KMS.NotFoundException", "InvalidStorageClass":
		e.kind, e.Hint = problem.Invalid, "correct the parameters of the URL"
	default:
		b.explainStatus(e, answer)
	}
}

func (b *Bucket) explainStatus(e *Error, answer minio.ErrorResponse) {
	if err := full(answer); err != nil {
		e.means, e.Hint = err, "free space on the server, or raise the quota of the bucket"
		return
	}
	switch {
	case isMismatch(answer):
		e.means = object.ErrChanged
	case answer.StatusCode == http.StatusMovedPermanently || answer.StatusCode == http.StatusTemporaryRedirect:
		e.kind, e.Hint = problem.Invalid, "the bucket is in another region: "+regionHint(answer.Region)
	case answer.StatusCode == http.StatusForbidden:
		e.kind, e.Hint = problem.Denied, "check the access key and its permissions"
	case answer.StatusCode == http.StatusTooManyRequests || answer.StatusCode == http.StatusServiceUnavailable:
		e.kind, e.Hint = problem.Unavailable, "the server asks for fewer requests: try again later, or with fewer writers"
	case answer.StatusCode >= http.StatusInternalServerError:
		e.kind, e.Hint = problem.Unavailable, "the server failed: try again later, and look at its log for the request"
	}
}

// explainLocal is explain for a request without an answer.
func (b *Bucket) explainLocal(e *Error, err error) {
	var (
		dns  *net.DNSError
		keys *keysError
	)
	if failed, whole := err.(*url.Error); whole { //nolint:errorlint // an error that wraps it has more to report
		e.Err = withoutURL{failed}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrExist), errors.Is(err, object.ErrTooLarge), errors.Is(err, object.ErrChanged):
	case errors.As(err, &keys):
		e.kind, e.Err = problem.Denied, keys
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
	case errors.As(err, new(x509.UnknownAuthorityError)), errors.As(err, new(*tls.CertificateVerificationError)):
		e.kind, e.Hint = problem.Invalid, "the server's certificate is not trusted: give its authority's in AWS_CA_BUNDLE or SSL_CERT_FILE, and use the name that the certificate has"
	case strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		e.kind, e.Hint = problem.Invalid, "the endpoint speaks HTTP: write http:// in endpoint="
	case errors.As(err, &dns):
		e.kind, e.Hint = problem.Unavailable, "check the name of the endpoint, the region, and the DNS of this machine"
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		e.kind, e.Hint = problem.Unavailable, "no server answers at "+b.endpoint()+": check endpoint=, and that the server runs"
	case errors.Is(err, errStalled), errors.Is(err, errBroken), errors.As(err, new(*url.Error)), errors.Is(err, io.ErrUnexpectedEOF):
		e.kind, e.Hint = problem.Unavailable, "the connection to "+b.endpoint()+" fails: check the network and the server"
	}
}

// withoutURL is an error of the HTTP client without the URL, which the text has already.
type withoutURL struct{ of *url.Error }

func (e withoutURL) Error() string { return e.of.Err.Error() }
func (e withoutURL) Unwrap() error { return e.of }

func (b *Bucket) endpoint() string {
	if b.at.Endpoint == "" {
		return "Amazon S3"
	}
	return b.at.Endpoint
}

func regionHint(region string) string {
	if region == "" {
		return "give it as region= in the URL, or in AWS_REGION"
	}
	return "give region=" + region + " in the URL, or AWS_REGION=" + region
}

// permission returns the permissions that a class of requests needs.
func permission(of class) string {
	switch of {
	case classGet, classHead:
		return "s3:GetObject and s3:ListBucket" // without the second a missing object is denied too
	case classList:
		return "s3:ListBucket, s3:ListBucketMultipartUploads and s3:ListMultipartUploadParts"
	case classDelete:
		return "s3:DeleteObject"
	case classAbort:
		return "s3:AbortMultipartUpload"
	case classOther:
		return "the reading of its configuration"
	}
	return "s3:PutObject"
}
