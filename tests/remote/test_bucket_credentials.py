"""Where a bucket has its credentials from, and that they appear nowhere."""

import json
import sys
import traceback
from contextlib import suppress
from pathlib import PurePosixPath
from urllib.parse import unquote

import pytest

from chainring._files import is_url
from chainring._places.bucket import MISSING, PART, PATIENCE, Bucket, RemoteError

KEY, SECRET, TOKEN, PASSWORD = "AKIDTHATNOBODYSEES", "secretThatNobodySees", "tokenThatNobodySees", "passwordThatNobodySees"
HASTY = PATIENCE._replace(retry=0.3, start=0.2, answer=0.3, part=0.5)
BROKEN = ["403 AccessDenied", "403 SignatureDoesNotMatch", "400 ExpiredToken", "404 NoSuchBucket", "301 PermanentRedirect",
          "412 PreconditionFailed",
          "409 Conflict", "418 Teapot", "503 SlowDown", "cut", "cut request", "cut response", "stall"]  # fmt: skip


@pytest.fixture
def nothing_set(s3, monkeypatch, tmp_path):
    """An environment without credentials, on a machine that has none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    return monkeypatch


@pytest.fixture
def profiles(nothing_set, tmp_path):
    """Writes profiles as users of AWS have them."""

    def write(text):
        (tmp_path / "config").write_text(text)
        nothing_set.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    return write


def signer(proxy):
    """The key and the region with which the last request was signed."""
    parts = proxy.requests[-1].headers["authorization"].partition("Credential=")[2].split("/")
    return parts[0], parts[2]


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_the_environment_names_the_store_also_over_plain_http(proxy, s3, monkeypatch, name):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(name, proxy.url)
    Bucket(s3).put("a", b"1")
    assert signer(proxy) == ("test", "us-east-1")


def test_a_profile_gives_keys_and_region(proxy, s3, profiles, monkeypatch):
    profiles(f"[profile training]\nregion = eu-west-3\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_PROFILE", "training")
    Bucket(s3).put("a", b"1", MISSING)
    assert signer(proxy) == (KEY, "eu-west-3")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    Bucket(s3).put("a", b"1")
    assert signer(proxy) == (KEY, "eu-north-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "first")
    Bucket(s3).put("a", b"1")
    assert signer(proxy)[0] == "first"


def test_a_profile_may_name_the_store(proxy, s3, profiles, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    profiles(f"[default]\nendpoint_url = {proxy.url}\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    Bucket(s3).put("a", b"1")
    assert signer(proxy)[0] == KEY


def test_a_program_may_give_the_keys_of_a_profile(proxy, s3, profiles, tmp_path):
    keys = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET, "SessionToken": TOKEN}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    profiles(f"[default]\ncredential_process = cat {tmp_path}/keys.json\n")
    Bucket(s3).put("a", b"1")
    assert signer(proxy)[0] == KEY
    assert proxy.requests[-1].headers["x-amz-security-token"] == TOKEN


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("absent", ["ProfileNotFound"]),
        ("sso", ["TokenLoadError"]),
    ],
)
def test_a_profile_that_gives_no_keys_is_an_error_with_a_remedy(s3, profiles, monkeypatch, profile, words):
    settings = "sso_start_url = https://x.invalid/start\nsso_region = us-east-1\nsso_account_id = 1\nsso_role_name = r\n"
    profiles(f"[profile sso]\n{settings}")
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(RemoteError) as refused:
        Bucket(s3).get("a")
    for word in [*words, "check AWS_PROFILE and ~/.aws"]:
        assert word in str(refused.value)


def test_a_profile_without_boto3_is_refused_with_what_to_install(s3, profiles, monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    monkeypatch.setenv("AWS_PROFILE", "training")
    with pytest.raises(ImportError, match=r"AWS_PROFILE is set, and profiles need boto3: pip install 'chainring\[remote\]'"):
        Bucket(s3).get("a")


def test_a_machine_without_credentials_is_told_so_soon(s3, nothing_set):
    with pytest.raises(RemoteError, match="no credentials were found; check the credentials: the variables AWS_"):
        Bucket(s3, HASTY).get("a")


def test_public_data_need_no_credentials(proxy, s3, nothing_set):
    nothing_set.setenv("AWS_SKIP_SIGNATURE", "true")
    with suppress(OSError):
        Bucket(s3).get("a")
    assert "authorization" not in proxy.requests[-1].headers


def test_obstore_is_asked_for_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r"object stores need obstore: pip install 'chainring\[remote\]'"):
        Bucket("memory:///run")


def everything_said(error):
    """The text of an error and of all that led to it, and the variables that a debugger or a log could show of it."""
    seen, todo, lines = set(), [error], []
    while todo:
        error = todo.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            report = traceback.TracebackException.from_exception(error, capture_locals=True)
            lines += [str(error), repr(error), *map(repr, error.args), *getattr(error, "__notes__", [])]
            ours = [frame for frame in report.stack if "/chainring/" in frame.filename]
            lines += [f"{name} = {value}" for frame in ours for name, value in (frame.locals or {}).items()]
            todo += [error.__cause__, error.__context__]
    return "\n".join(lines)


def deeds(bucket):
    def send():
        with bucket.upload("large") as file:
            file.write(bytes(PART + 1))

    return [
        lambda: bucket.get("a"), lambda: bucket.head("a"), lambda: bucket.open("a"),
        lambda: bucket.put("a", b"1"), lambda: bucket.put("a", b"1", MISSING), bucket.list, lambda: bucket.delete(["a"]),
        send, bucket.check_conditions,
    ]  # fmt: skip


def assert_silent(bucket, capfd, secrets, count=None):
    """Everything that can be done with a bucket fails, and nothing that is said has a secret in it."""
    failed, said = 0, [repr(bucket), bucket.url]
    for deed in deeds(bucket):
        try:
            deed()
        except (OSError, ValueError) as error:
            failed += 1
            said.append(everything_said(error))
    assert failed >= (len(deeds(bucket)) if count is None else count)
    text = "\n".join([*said, *capfd.readouterr()])
    assert not [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("fault", BROKEN)
def test_no_error_shows_what_a_request_carried(proxy, s3, monkeypatch, capfd, fault):
    """Not in its text, nor in that of errors before it, nor in variables of its traceback; the store repeats what it got."""
    for name, value in {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    proxy.fail(fault, times=1000)
    assert_silent(Bucket(f"{s3}/run", HASTY), capfd, [KEY, SECRET, TOKEN, "Signature=", "X-Amz"])
    assert proxy.requests[0].headers["x-amz-security-token"] == TOKEN


@pytest.mark.parametrize("place", ["127.0.0.1:9", "store.invalid", "{server}"])
def test_no_error_shows_the_password_in_the_address_of_a_store(object_server, s3, monkeypatch, capfd, place):
    server = object_server.removeprefix("http://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{PASSWORD}@{place.format(server=server)}")
    assert_silent(Bucket("s3://no-such-bucket/run", HASTY), capfd, [PASSWORD])


def test_no_error_shows_a_signature_in_the_address_of_a_request(proxy, monkeypatch, capfd):
    """Azure's shared access signatures are part of every address."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", proxy.url)
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", f"sv=2024&sp=rw&sig={SECRET}")
    for fault in ("403 AuthorizationFailure", "cut"):
        proxy.heal()
        proxy.fail(fault, times=1000)
        assert_silent(Bucket("az://container/run", HASTY), capfd, [SECRET, "sig="])
    assert SECRET in proxy.requests[0].path


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_CONDITIONAL_PUT", SECRET), ("AWS_ENDPOINT_URL", f"{SECRET}://{SECRET}"), ("AWS_S3_EXPRESS", SECRET)],
)
def test_no_error_shows_a_setting_that_cannot_be_used(s3, monkeypatch, capfd, name, value):
    monkeypatch.setenv(name, value)
    assert_silent(Bucket(f"{s3}/run", HASTY), capfd, [SECRET])


@pytest.mark.parametrize("url", [f"s3://{KEY}:{SECRET}@bucket/run", f"s3://{KEY}:{SECRET}/run", f"s3://bucket/run?key={SECRET}",
                                 f"https://{KEY}:{SECRET}@host/run", f"s3:///{KEY}:{SECRET}@bucket"])  # fmt: skip
def test_an_address_with_credentials_is_refused_without_repeating_them(url):
    with pytest.raises(ValueError, match="written") as refused:
        Bucket(url)
    assert SECRET not in str(refused.value)
    assert refused.value.__context__ is None


def test_a_path_made_of_an_address_with_credentials_does_not_repeat_them():
    with pytest.raises(ValueError, match="an address is given as text") as refused:
        is_url(PurePosixPath(f"s3://{KEY}:{SECRET}@bucket/run"))
    assert SECRET not in str(refused.value)


def test_conditions_are_asked_for_in_the_words_of_each_store(proxy, monkeypatch):
    """For Google's and Azure's stores no server runs here; this is what they are sent."""
    emulator = {
        "gcs_base_url": proxy.url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(emulator))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", proxy.url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    for url, name, value in (("gs://b/run", "x-goog-if-generation-match", "0"), ("az://b/run", "if-none-match", "*")):
        with suppress(OSError):
            Bucket(url, HASTY).put("a", b"1", MISSING)
        request = next(request for request in reversed(proxy.requests) if request.method == "PUT")
        assert unquote(request.path).endswith("run/a")
        assert request.headers[name] == value
